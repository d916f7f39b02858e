//! Does the official `openai` SDK work unchanged?
//!
//! The checks are Python (load-tests/clients/openai_sdk.py), since the SDK's own parsing and error
//! classes are what is under test. `make test` installs the SDK into .tools/venv.

mod support;

use std::process::Command;

use rustix::process::Signal;
use support::{MODEL, Stack, root};

#[test]
fn the_openai_sdk_speaks_to_the_stack() {
    // Catches an answer, a stream or an error that only our own client would understand.
    let python = root().join(".tools/venv/bin/python");
    assert!(
        python.exists(),
        "{} is missing: run `make test`",
        python.display()
    );
    let stack = Stack::start(2);
    let output = Command::new(python)
        .arg(root().join("load-tests/clients/openai_sdk.py"))
        .args([&stack.ready.url, &stack.ready.api_key, MODEL])
        .output()
        .expect("Python runs");
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.status.success(), "{text}");
    assert!(text.matches("ok ").count() >= 8, "{text}");
    stack.stop(Signal::INT);
}
