//! Catches a size, an endpoint or a flag that is read as something else than it says.
use super::*;

#[test]
fn sizes() {
    let rows = [
        ("0", Ok(0)),
        ("1048576", Ok(1 << 20)),
        ("512MiB", Ok(512 << 20)),
        ("2 GiB", Ok(2 << 30)),
        ("7KiB", Ok(7 << 10)),
        ("512MB", Err(())),
        ("-1", Err(())),
        ("1.5GiB", Err(())),
        ("MiB", Err(())),
        ("", Err(())),
        ("99999999999999999999", Err(())),
        ("18446744073709551615GiB", Err(())),
    ];
    for (text, expected) in rows {
        assert_eq!(parse_size(text).map_err(|_| ()), expected, "{text}");
    }
}

#[test]
fn endpoints() {
    let rows = [
        ("tcp://127.0.0.1:5557", Some("tcp://127.0.0.1:5557")),
        ("tcp://*:0", Some("tcp://0.0.0.0:0")),
        ("tcp://host:70000", None),
        ("ipc:///tmp/x", None),
        ("tcp://:1", None),
        ("5557", None),
    ];
    for (text, expected) in rows {
        assert_eq!(parse_endpoint(text).ok().as_deref(), expected, "{text}");
    }
}

fn config(args: &[&str]) -> Result<Config, String> {
    let whole = ["homing-engine", "serve", "--model", "some/name.gguf"];
    let cli = Cli::try_parse_from(whole.iter().chain(args)).map_err(|e| e.to_string())?;
    match cli.task().map_err(|e| e.to_string())? {
        Task::Serve(config) => Ok(*config),
        other => Err(format!("{other:?}")),
    }
}

#[test]
fn refusals_name_the_flag() {
    let rows: [(&[&str], &str); 12] = [
        (&["--kv-dtype", "fp8"], "bf16"),
        (
            &["--kv-dtype", "int8", "--ops", "reference"],
            "--kv-dtype is int8",
        ),
        (
            &["--kv-dtype", "int8", "--kv-tier-form", "int8"],
            "8 bits already",
        ),
        (&["--kv-disk", "some/dir"], "--kv-host-memory"),
        (&["--listen", "0.0.0.0:1"], "node token"),
        (&["--listen", "nonsense"], "--listen"),
        (&["--threads", "0"], "--threads"),
        (&["--kv-memory", "lots"], "--kv-memory"),
        (&["--step-tokens", "0"], "--step-tokens"),
        (&["--model-id", "a b"], "--model-id"),
        (&["--replay", "tcp://127.0.0.1:0"], "--events"),
        (
            &["--node-token-file", "/nonexistent/token"],
            "/nonexistent/token",
        ),
    ];
    for (args, expected) in rows {
        let error = config(args).expect_err("refused");
        assert!(error.contains(expected), "{args:?}: {error}");
    }
}

#[test]
fn the_pool_stores_what_was_said() {
    let ops = |args: &[&str]| config(args).expect("valid").ops;
    assert_eq!(ops(&[]), OpsKind::Cpu);
    assert_eq!(ops(&["--kv-dtype", "f16"]), OpsKind::Cpu);
    assert_eq!(ops(&["--kv-dtype", "bf16"]), OpsKind::CpuBf16);
    assert_eq!(ops(&["--kv-dtype", "int8"]), OpsKind::CpuInt8);
    assert_eq!(ops(&["--ops", "reference"]), OpsKind::Reference);
    let below = config(&["--kv-dtype", "bf16", "--kv-tier-form", "int8"]);
    assert_eq!(below.expect("valid").kv_tier_form, Form::Int8);
}

#[test]
fn formats_are_detected_unless_said() {
    let formats = |args: &[&str]| config(args).expect("valid").formats;
    assert_eq!(formats(&[]), FormatChoice::default());
    let said = formats(&["--tool-format", "mistral", "--reasoning-format", "none"]);
    assert_eq!(said.tools, Some(ToolFormat::Mistral));
    assert_eq!(said.reasoning, Some(None));
    let think = formats(&["--reasoning-format", "think"]).reasoning;
    assert_eq!(think, Some(Some(ReasoningFormat::Think)));
    assert!(
        config(&["--tool-format", "xml"])
            .expect_err("refused")
            .contains("hermes")
    );
    assert_eq!(
        config(&[]).expect("valid").pooling,
        crate::engine::Pooling::Mean
    );
}

#[test]
fn wiping_needs_a_scope() {
    let task = |args: &[&str]| {
        let whole = ["homing-engine", "kv", "wipe", "--kv-disk", "d"];
        let cli = Cli::try_parse_from(whole.iter().chain(args));
        cli.map(|cli| cli.task().expect("nothing to refuse"))
            .map_err(|_| ())
    };
    let scope = |args: &[&str]| match task(args) {
        Ok(Task::Wipe(dir, scope)) if dir.as_os_str() == "d" => Some(scope),
        _ => None,
    };
    let salt = Scope::Salt("a".to_owned());
    assert_eq!(scope(&["--salt", "a"]), Some(salt));
    assert_eq!(scope(&["--unsalted"]), Some(Scope::Unsalted));
    assert_eq!(scope(&["--everything"]), Some(Scope::Everything));
    assert_eq!(scope(&[]), None);
    assert_eq!(scope(&["--everything", "--salt", "a"]), None);
}

#[test]
fn the_model_is_called_after_its_file() {
    assert_eq!(config(&[]).expect("valid").model_id, "name");
    assert_eq!(
        config(&["--model-id", "other/x"]).expect("valid").model_id,
        "other/x"
    );
    let folder = tempfile::tempdir().expect("a folder");
    let version = folder.path().join("Qwen2.5-0.5B");
    std::fs::create_dir(&version).expect("a folder");
    let id = |model: &str| {
        let cli = Cli::try_parse_from(["homing-engine", "serve", "--model", model]);
        match cli.map(Cli::task) {
            Ok(Ok(Task::Serve(config))) => Ok(config.model_id),
            Ok(other) => Err(format!("{other:?}")),
            Err(error) => Err(error.to_string()),
        }
    };
    let named = |model: &str, expected: &str| assert_eq!(id(model).as_deref(), Ok(expected));
    named(&version.display().to_string(), "Qwen2.5-0.5B");
    named("hf:org/repo", "org/repo");
    named("hf:org/repo/some.Q4_1.gguf@v1", "some.Q4_1");
    assert!(
        id("hf:nothing")
            .expect_err("refused")
            .contains("hf:org/repo")
    );
}
