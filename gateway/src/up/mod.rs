//! How does one command give a working endpoint?
//!
//! `homing up` is a gateway as in [`crate::serve`] plus engine nodes that it starts and keeps alive
//! itself (`nodes`), on loopback ports it picks once (`plan`), and a tenant `demo` with an API key.
//! The gateway starts first: a busy port or data directory is noticed before a model is loaded.
//!
//! Order of shutdown: the gateway drains while the nodes still answer; then the nodes get SIGTERM;
//! then the ledger closes. Nodes are in process groups of their own, so that Ctrl-C reaches only
//! the gateway, and end by themselves when the pipe to a killed gateway breaks.

use std::fs::OpenOptions;
use std::io::{IsTerminal as _, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use policies::view::NodeState;

use crate::cli::{Failure, UpArgs, log};
use crate::fleet::Fleet;
use crate::serve::Server;
use crate::store::{Debug, Store, TenantId};

mod announce;
mod model;
mod nodes;
mod plan;
mod progress;

use model::Model;
use nodes::{Nodes, NotStarted};
use plan::Plan;
use progress::Progress;

/// The model that `make run` fetches.
pub const DEFAULT_MODEL: &str = "models/SmolLM2-135M-Instruct.Q4_1.gguf";

/// What Claude Code and Codex ask for by themselves. Any other name that is not the model's stays
/// unknown, so that a mistyped one is told and not answered.
pub const DEFAULT_ALIASES: [&str; 3] = ["claude-*", "gpt-*", "codex-*"];

/// The tenant that is made on first start.
const DEMO: &str = "demo";

/// How often the fleet is asked whether all nodes are up.
const READY_CHECK_EVERY: Duration = Duration::from_millis(20);

/// Runs gateway and nodes until a signal ends them.
pub fn run(args: &UpArgs) -> Result<(), Failure> {
    let plan = Plan::make(args, Model::named(&args.model, engine_program)?)?;
    let engine = engine_program()?;
    log_to_file(args)?;
    let mut server = Server::start(plan.config()?)?;
    let outcome = serve(args, &plan, engine, &mut server);
    server.leave();
    outcome
}

fn serve(args: &UpArgs, plan: &Plan, engine: PathBuf, server: &mut Server) -> Result<(), Failure> {
    let key = demo_key(
        &server.store,
        if args.json {
            Key::EachStart
        } else {
            Key::FirstStart
        },
    )?;
    let progress = Progress::new(plan, args.json || !std::io::stderr().is_terminal());
    let token = server.secrets.node_token().to_owned();
    let nodes = Arc::new(Nodes::new(engine, token, args.data.join("logs"), progress)?);
    let failed = nodes.start(plan, &server.tasks);
    let fleet = Arc::clone(&server.fleet);
    let ready = server.run_until_signal(async {
        tokio::select! {
            () = all_up(&fleet) => Ok(()),
            why = failed => Err(why),
        }
    });
    nodes.progress.finish();
    match ready {
        None => return Ok(()),
        Some(Err(NotStarted { node, why })) => {
            return Err(format!("node {node} did not start: {why}").into());
        }
        Some(Ok(())) => nodes.mark_started(),
    }
    let text = if args.json {
        announce::json(server, plan, &nodes, key.as_deref())
    } else {
        announce::text(server, plan, args, key.as_deref())
    };
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()?;
    drop(stdout);
    server.until_signal();
    if !args.json {
        // A terminal that is gone needs no farewell.
        let _ = writeln!(
            std::io::stderr(),
            "\nStopping: requests in flight may end first."
        );
    }
    Ok(())
}

async fn all_up(fleet: &Fleet) {
    while fleet
        .nodes()
        .iter()
        .any(|node| node.facts().state != NodeState::Up)
    {
        tokio::time::sleep(READY_CHECK_EVERY).await;
    }
}

/// When a key for the demo tenant is made.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Key {
    /// Only together with the tenant: people keep theirs.
    FirstStart,
    /// Always: a script is told one, and the old ones cannot be shown again.
    EachStart,
}

/// The tenant `demo`, and a key of it if one was made.
fn demo_key(store: &Store, when: Key) -> Result<Option<String>, Failure> {
    let demo = TenantId::new(DEMO)?;
    let first_start = !store.has_tenant(&demo)?;
    if first_start {
        store.create_tenant(&demo, Debug::Permitted)?;
    }
    if first_start || when == Key::EachStart {
        return Ok(Some(store.create_key(&demo)?.secret));
    }
    Ok(None)
}

/// The engine is installed next to this program.
fn engine_program() -> Result<PathBuf, Failure> {
    let engine = std::env::current_exe()?.with_file_name("homing-engine");
    if engine.is_file() {
        return Ok(engine);
    }
    Err(format!(
        "{} is missing: build it with `make build`",
        engine.display()
    )
    .into())
}

/// The terminal belongs to the user: the log goes to a file.
fn log_to_file(args: &UpArgs) -> Result<(), Failure> {
    let logs = args.data.join("logs");
    let path = logs.join("gateway.log");
    crate::secrets::private_dir(&logs)
        .and_then(|()| {
            OpenOptions::new()
                .append(true)
                .create(true)
                .mode(0o600)
                .open(&path)
        })
        .map(log::to_file)
        .map_err(|error| format!("cannot write {}: {error}", path.display()).into())
}
