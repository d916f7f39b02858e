//! `homing-load`: which tool was asked for?
//!
//! Parses the command line, runs one tool on one thread (a load generator that shares the cores with
//! what it measures should take as few of them as it can), prints what came out. stdout holds the
//! result and nothing else; progress and errors go to stderr. Exit code 0: done; 1: nothing came of
//! it (all requests failed, a program did not start); 2: the command line is wrong.

use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use load_tests::error::LoadError;
use load_tests::report::Report;
use load_tests::{
    agent, answers, clients, constrain_bench, disaggregation_bench, echo_node, engine_bench,
    fairness_bench, gateway_bench, http_bench, node, policy, random_model, routing_bench,
    scripted_node, simulate, soak, vllm_check,
};
use serde::Serialize;

#[derive(Parser)]
#[command(
    name = "homing-load",
    version,
    about = "Load tests and benches for Homing"
)]
struct Cli {
    #[command(subcommand)]
    tool: Tool,
}

#[derive(Subcommand)]
enum Tool {
    /// Agentic sessions in open loop against any OpenAI-compatible address
    Agent(agent::Args),
    /// How many tokens of answers would be computed again in the next turn?
    Answers(answers::Args),
    /// A fixed number of requests in closed loop: latency of one address
    HttpBench(http_bench::Args),
    /// How would routing policies fare on a trace? On a virtual clock
    Simulate(Box<simulate::Args>),
    /// Thousands of requests of every kind; at the end a node must have everything back
    Soak(soak::Args),
    /// The product's routing policies for an outside simulator: JSON lines on stdin and stdout
    Policy(policy::Args),
    /// Simulated nodes over real HTTP and KV events
    Node(Box<node::Args>),
    /// SDKs, frameworks and coding agents, each through a conversation with tools
    #[command(hide = true)]
    Clients(clients::Args),
    /// What a grammar costs, and what forced tokens gain
    #[command(hide = true)]
    ConstrainBench(constrain_bench::Args),
    /// Prompts and answers on nodes of their own beside mixed nodes
    #[command(hide = true)]
    DisaggregationBench(Box<disaggregation_bench::Args>),
    /// Our engine beside llama.cpp's server
    #[command(hide = true)]
    EngineBench(Box<engine_bench::Args>),
    /// Answers that stream while long prompts arrive
    #[command(hide = true)]
    FairnessBench(fairness_bench::Args),
    /// Our gateway beside SMG and nginx
    #[command(hide = true)]
    GatewayBench(gateway_bench::Args),
    /// A model file of a real shape with random weights
    #[command(hide = true)]
    RandomModel(random_model::Args),
    /// Where our gateway and SMG send the turns of agents, before simulated nodes
    #[command(hide = true)]
    RoutingBench(Box<routing_bench::Args>),
    /// Our gateway's index beside what a real vLLM reports
    #[command(hide = true)]
    VllmCheck(vllm_check::Args),
    /// A node that computes nothing
    #[command(hide = true)]
    EchoNode(echo_node::Args),
    /// A node that computes nothing and uses tools as agents expect
    #[command(hide = true)]
    ScriptedNode(scripted_node::Args),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let runtime = match tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("homing-load: starting the runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(until_signal(run(cli.tool))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("homing-load: {error}");
            match error {
                LoadError::Url { .. } | LoadError::Flag { .. } => ExitCode::from(2),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

/// Ends a tool on Ctrl-C or SIGTERM by dropping it, which ends the programs that it started.
async fn until_signal(work: impl Future<Output = Result<(), LoadError>>) -> Result<(), LoadError> {
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())
        .map_err(LoadError::system("listening for SIGTERM"))?;
    tokio::select! {
        done = work => done,
        _ = tokio::signal::ctrl_c() => Err(LoadError::Interrupted),
        _ = terminate.recv() => Err(LoadError::Interrupted),
    }
}

async fn run(tool: Tool) -> Result<(), LoadError> {
    match tool {
        Tool::Agent(args) => run_agent(&args).await,
        Tool::Answers(args) => {
            let answers = answers::run(&args).await?;
            show(&answers.table(), &answers, args.json.as_deref())
        }
        Tool::HttpBench(args) => run_http_bench(&args).await,
        // It computes and waits for nothing, so it may keep the thread.
        Tool::Simulate(args) => simulate::show(&args),
        Tool::Soak(args) => {
            let soak = soak::run(&args).await?;
            show(&soak.table(), &soak, args.json.as_deref())?;
            match soak.faults() {
                faults if faults.is_empty() => Ok(()),
                faults => Err(LoadError::program("the soak", faults.join("; "))),
            }
        }
        Tool::Policy(args) => policy::run(&args),
        Tool::Clients(args) => run_clients(&args).await,
        Tool::ConstrainBench(args) => {
            let costs = constrain_bench::run(&args).await?;
            show(&costs.table(), &costs, args.json.as_deref())
        }
        Tool::DisaggregationBench(args) => {
            let comparison = disaggregation_bench::run(&args).await?;
            show(&comparison.table(), &comparison, args.json.as_deref())
        }
        Tool::EngineBench(args) => {
            let comparison = engine_bench::run(&args).await?;
            show(&comparison.table(), &comparison, args.json.as_deref())
        }
        Tool::FairnessBench(args) => {
            let fairness = fairness_bench::run(&args).await?;
            show(&fairness.table(), &fairness, args.json.as_deref())
        }
        Tool::GatewayBench(args) => {
            let comparison = gateway_bench::run(&args).await?;
            show(&comparison.table(), &comparison, args.json.as_deref())
        }
        Tool::Node(args) => {
            let nodes = node::Nodes::bind(&args).await?;
            println!("{}", json(&nodes.places()?)?);
            until_stdin_ends(nodes.serve(), args.exit_with_stdin).await
        }
        Tool::RandomModel(args) => random_model::run(&args),
        Tool::RoutingBench(args) => {
            let comparison = routing_bench::run(&args).await?;
            show(&comparison.table(), &comparison, args.json.as_deref())
        }
        Tool::VllmCheck(args) => {
            let checked = vllm_check::run(&args).await?;
            show(&checked.table(), &checked, args.json.as_deref())?;
            match checked.is_good() {
                true => Ok(()),
                false => Err(LoadError::program("the check", checked.verdict())),
            }
        }
        Tool::EchoNode(args) => {
            let node = echo_node::EchoNode::bind(&args).await?;
            println!("http://{}", node.address()?);
            until_stdin_ends(node.serve(), args.exit_with_stdin).await
        }
        Tool::ScriptedNode(args) => {
            let node = scripted_node::ScriptedNode::bind(&args).await?;
            println!("http://{}", node.address()?);
            until_stdin_ends(node.serve(), args.exit_with_stdin).await
        }
    }
}

/// Serves, and no longer than stdin is open where that is wanted.
async fn until_stdin_ends(
    serve: impl Future<Output = Result<(), LoadError>>,
    is_wanted: bool,
) -> Result<(), LoadError> {
    if !is_wanted {
        return serve.await;
    }
    tokio::select! {
        done = serve => done,
        () = stdin_ends() => Ok(()),
    }
}

/// Waits for the end of stdin on a thread of its own, since reading it may block for ever.
async fn stdin_ends() {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        // Its end and an error mean the same: whoever started this is gone.
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        let _ = sender.send(());
    });
    let _ = receiver.await;
}

async fn run_http_bench(args: &http_bench::Args) -> Result<(), LoadError> {
    let figures = http_bench::run(args).await?;
    println!("{}", json(&figures)?);
    match figures.first_failure {
        Some(first) if figures.failed == figures.requests => Err(LoadError::AllFailed {
            requests: figures.requests,
            first,
        }),
        _ => Ok(()),
    }
}

async fn run_clients(args: &clients::Args) -> Result<(), LoadError> {
    let clients = clients::run(args).await?;
    show(&clients.table(), &clients, args.json.as_deref())?;
    match clients.failed() {
        0 => Ok(()),
        failed => Err(LoadError::program(
            "the clients",
            format!("{failed} conversations failed"),
        )),
    }
}

async fn run_agent(args: &agent::Args) -> Result<(), LoadError> {
    let run = agent::run(args).await?;
    if let Some(path) = &args.records {
        let lines: Result<Vec<String>, LoadError> = run.records.iter().map(json).collect();
        std::fs::write(path, lines?.join("\n") + "\n").map_err(LoadError::file(path))?;
    }
    let report = Report::of(&run);
    show(&report.table(), &report, args.json.as_deref())?;
    match run.records.iter().find_map(|r| r.failure.as_ref()) {
        Some(first) if report.ok == 0 => Err(LoadError::AllFailed {
            requests: report.requests,
            first: format!("{}: {}", first.kind, first.message),
        }),
        _ => Ok(()),
    }
}

/// The table on stdout and JSON in the file, or JSON alone where the file is `-`.
fn show(table: &str, value: &impl Serialize, file: Option<&Path>) -> Result<(), LoadError> {
    let Some(path) = file else {
        print!("{table}");
        return Ok(());
    };
    let text = json(value)?;
    if path == Path::new("-") {
        println!("{text}");
        return Ok(());
    }
    print!("{table}");
    std::fs::write(path, text + "\n").map_err(LoadError::file(path))
}

fn json(value: &impl Serialize) -> Result<String, LoadError> {
    serde_json::to_string(value).map_err(|e| LoadError::program("a report", e.to_string()))
}
