//! Do the official SDKs run a conversation with a tool call, in every dialect, unchanged?
//!
//! The checks are in the drivers (load-tests/clients), in the clients' own languages, since the
//! clients' own parsing, errors and usage objects are what is under test. `make test` installs these
//! SDKs; frameworks and coding agents are driven by `make clients`, in the same way.

mod support;

use std::process::Command;

use load_tests::clients::stacks::{self, Endpoint};
use load_tests::clients::{Mode, SDKS};
use rustix::process::Signal;
use support::{MODEL, Stack, binary, root};

/// Drives every SDK and fails with all that failed.
fn drive_all(endpoint: &Endpoint, mode: Mode) {
    let mut failures = Vec::new();
    for client in SDKS {
        assert!(
            client.is_installed(&root()),
            "{} is not installed: run `make test`",
            client.name
        );
        match client.drive(&root(), endpoint, mode) {
            Ok(outcome) => {
                assert!(!outcome.checks.is_empty(), "{outcome:?}");
                let failed = outcome
                    .checks
                    .into_iter()
                    .filter(|check| check.error.is_some());
                failures.extend(failed.map(|check| format!("{}: {check:?}", client.name)));
            }
            Err(error) => failures.push(error.to_string()),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[tokio::test]
async fn every_sdk_lets_a_scripted_model_use_a_tool() {
    // Catches a dialect in which a client does not see a call that the model chose to make, loses it
    // on the way back, or is not told what was cached.
    let folder = tempfile::tempdir().expect("a temporary folder");
    let stack = stacks::scripted(&binary("homing"), folder.path())
        .await
        .unwrap_or_else(|e| panic!("{e}"));
    drive_all(&stack.endpoint, Mode::Free);
}

#[test]
fn every_sdk_has_the_default_model_call_and_answer() {
    // Catches a `tool_choice` that does not reach the engine from some dialect, and a prompt that is
    // not the last one extended: its cached tokens would show it.
    let stack = Stack::start(2);
    let endpoint = Endpoint {
        url: stack.ready.url.clone(),
        key: stack.ready.api_key.clone(),
        model: MODEL.to_owned(),
    };
    drive_all(&endpoint, Mode::Forced);
    stack.stop(Signal::INT);
}

#[test]
fn the_openai_sdk_reads_every_answer_and_error() {
    // Catches an answer, a stream or an error that only our own client would understand.
    let stack = Stack::start(2);
    let output = Command::new(root().join(".tools/clients/sdks/bin/python"))
        .arg(root().join("load-tests/clients/openai_sdk.py"))
        .args([&stack.ready.url, &stack.ready.api_key, MODEL])
        .output()
        .expect("Python runs: `make test` installs it");
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.status.success(), "{text}");
    assert!(text.matches("ok ").count() >= 8, "{text}");
    stack.stop(Signal::INT);
}
