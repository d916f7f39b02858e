//! Does a node survive thousands of requests of every kind, and has it everything back then?
//!
//! So many clients send one drawn request after the other (`request`), some hang up at a random
//! moment, some ask for nonsense. Each response is read to its end and judged (`answer`). When all
//! have ended, every gauge of what a request holds must return to zero, and the processes' memory
//! must not have grown (`report`). Timing is not measured here.

mod answer;
mod report;
mod request;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use tokio::task::LocalSet;

use self::answer::Ending;
use self::report::EXAMPLES_MAX;
pub use self::report::{Endings, Rss, Soak};
use self::request::{Patience, Request};
use crate::error::LoadError;
use crate::http::{Connection, SendFailure, Target};
use crate::process::memory;

/// Gauges of what requests hold; all are zero on an idle node. Those of other engines are absent.
const GAUGES: [&str; 5] = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "homing:kv_blocks_held",
    "homing:kv_blocks_pinned",
    "homing:kv_tickets",
];
/// Until everything must be back: a ticket's lease, and a stride of the slowest machine.
const SETTLE: Duration = Duration::from_secs(60);
/// Between two looks at memory or gauges.
const LOOK: Duration = Duration::from_millis(200);

/// Flags of `homing-load soak`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Address of the API, such as http://127.0.0.1:8080/v1
    #[arg(long)]
    pub url: String,
    /// Key for it
    #[arg(long, env = "HOMING_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Model to ask for
    #[arg(long)]
    pub model: String,
    /// Requests in all
    #[arg(long, default_value_t = 10_000)]
    pub requests: u64,
    /// Clients at once
    #[arg(long, default_value_t = 24)]
    pub clients: usize,
    /// Where a node's metrics are, such as http://127.0.0.1:8000/metrics; may be given again
    #[arg(long, value_name = "URL")]
    pub metrics: Vec<String>,
    /// A process whose memory is watched; may be given again
    #[arg(long, value_name = "PID")]
    pub pid: Vec<u32>,
    /// Seconds after which a request without an end counts as stuck
    #[arg(long, default_value_t = 180)]
    pub stuck_s: u64,
    /// Seed of everything that is drawn
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Write the figures here as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// What the clients share.
struct Run {
    args: Args,
    target: Target,
    next: Cell<u64>,
    ended: Cell<u64>,
    endings: Cell<Endings>,
    kinds: RefCell<BTreeMap<&'static str, u64>>,
    examples: RefCell<Vec<String>>,
}

/// Sends all requests and waits until the nodes are idle.
pub async fn run(args: &Args) -> Result<Soak, LoadError> {
    let run = Rc::new(Run {
        target: Target::parse(&args.url)?,
        args: args.clone(),
        next: Cell::new(0),
        ended: Cell::new(0),
        endings: Cell::default(),
        kinds: RefCell::default(),
        examples: RefCell::default(),
    });
    let begun = Instant::now();
    let memory = LocalSet::new()
        .run_until(async {
            let clients = (0..args.clients).map(|_| tokio::task::spawn_local(client(run.clone())));
            let clients: Vec<_> = clients.collect();
            let watch = watch(&run).await;
            for client in clients {
                client
                    .await
                    .map_err(|e| LoadError::program("a client", e.to_string()))?;
            }
            Ok::<_, LoadError>(watch)
        })
        .await?;
    let seconds = begun.elapsed().as_secs_f64();
    let left_over = settle(&args.metrics).await?;
    let mut memory = memory;
    for rss in &mut memory {
        rss.last_mib = own_mib(rss.pid);
    }
    let soak = Soak {
        requests: run.ended.get(),
        seconds,
        endings: run.endings.get(),
        kinds: run.kinds.borrow().clone(),
        examples: run.examples.borrow().clone(),
        left_over,
        memory,
    };
    Ok(soak)
}

/// One client: requests in turn over a connection that it keeps.
async fn client(run: Rc<Run>) {
    let mut connection = Connection::new(&run.target);
    loop {
        let number = run.next.get();
        if number == run.args.requests {
            return;
        }
        run.next.set(number + 1);
        let request = request::draw(run.args.seed, number, &run.args.model);
        let ending = exchange(&run, &mut connection, &request).await;
        run.note(number, &request, &ending);
    }
}

/// Sends one request and reads what comes.
async fn exchange(run: &Run, connection: &mut Connection, request: &Request) -> Ending {
    let stuck = Duration::from_secs(run.args.stuck_s);
    let (limit, late) = match request.patience {
        Patience::Whole => (stuck, Ending::Stuck),
        Patience::Leaves(after) => (after, Ending::Left),
    };
    let work = async {
        let http = http_request(run, request);
        match connection.send(http).await {
            Ok(response) => answer::read(request, response).await,
            Err(SendFailure::Connect(what)) => Ending::Wrong(format!("no connection: {what}")),
            Err(SendFailure::Broken(what)) => Ending::Wrong(format!("no response: {what}")),
        }
    };
    let ending = tokio::time::timeout(limit, work).await.unwrap_or(late);
    if !matches!(ending, Ending::Good | Ending::Refused) {
        connection.close();
    }
    ending
}

fn http_request(run: &Run, request: &Request) -> hyper::Request<Full<Bytes>> {
    let path = match request.endpoint.strip_prefix('/') {
        Some(_) => request.endpoint.to_owned(),
        None => run.target.path(request.endpoint),
    };
    let body = Full::new(Bytes::from(request.body.to_string()));
    let mut http = hyper::Request::new(body);
    *http.method_mut() = hyper::Method::POST;
    *http.uri_mut() = path.parse().unwrap_or_default();
    let key = run.args.api_key.as_ref().map(|key| format!("Bearer {key}"));
    let fields = [
        ("host", Some(run.target.authority().to_owned())),
        ("content-type", Some("application/json".to_owned())),
        ("authorization", key),
    ];
    for (name, value) in fields {
        if let Some(Ok(value)) = value.map(|value| value.parse()) {
            http.headers_mut().insert(name, value);
        }
    }
    http
}

impl Run {
    fn note(&self, number: u64, request: &Request, ending: &Ending) {
        self.ended.set(self.ended.get() + 1);
        *self.kinds.borrow_mut().entry(request.kind).or_default() += 1;
        let mut endings = self.endings.get();
        let (count, what) = match ending {
            Ending::Good => (&mut endings.answered, None),
            Ending::Refused => (&mut endings.refused, None),
            Ending::Left => (&mut endings.left, None),
            Ending::Busy => (&mut endings.busy, None),
            Ending::TimedOut => (&mut endings.timed_out, None),
            Ending::Stuck => (&mut endings.stuck, Some("stuck")),
            Ending::Wrong(what) => (&mut endings.errors, Some(what.as_str())),
        };
        *count += 1;
        self.endings.set(endings);
        let mut examples = self.examples.borrow_mut();
        if let Some(what) = what
            && examples.len() < EXAMPLES_MAX
        {
            let body: String = request.body.to_string().chars().take(400).collect();
            examples.push(format!(
                "{what} (request {number}: {} {body})",
                request.kind
            ));
        }
    }
}

/// Watches memory until the last request ended. The first look is after a tenth of them: by then
/// every buffer has been used.
async fn watch(run: &Run) -> Vec<Rss> {
    let mut seen: Vec<Rss> = Vec::new();
    let mut said = 0;
    while run.ended.get() < run.args.requests {
        tokio::time::sleep(LOOK).await;
        let ended = run.ended.get();
        if ended * 10 >= run.args.requests && seen.is_empty() {
            let first = |pid: &u32| Rss {
                pid: *pid,
                first_mib: own_mib(*pid),
                most_mib: 0.0,
                last_mib: 0.0,
            };
            seen = run.args.pid.iter().map(first).collect();
        }
        for rss in &mut seen {
            rss.most_mib = rss.most_mib.max(own_mib(rss.pid));
        }
        let tenth = ended * 10 / run.args.requests.max(1);
        if tenth > said {
            said = tenth;
            eprintln!(
                "{ended} of {} requests: {:?}",
                run.args.requests,
                run.endings.get()
            );
        }
    }
    seen
}

fn own_mib(pid: u32) -> f64 {
    memory(pid).anonymous as f64 / f64::from(1 << 20)
}

/// Waits until every gauge is zero, and returns them as they are then.
async fn settle(metrics: &[String]) -> Result<BTreeMap<String, f64>, LoadError> {
    let deadline = Instant::now() + SETTLE;
    loop {
        let mut all = BTreeMap::new();
        for url in metrics {
            let text = fetch(url).await?;
            for gauge in GAUGES {
                if let Some(value) = value_of(&text, gauge) {
                    all.insert(format!("{url} {gauge}"), value);
                }
            }
        }
        if all.values().all(|value| *value == 0.0) || Instant::now() >= deadline {
            return Ok(all);
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// A metric's sum over its labels, in Prometheus' text format.
fn value_of(text: &str, name: &str) -> Option<f64> {
    let lines = text
        .lines()
        .filter(|line| line.split(['{', ' ']).next() == Some(name));
    let values = lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    values.reduce(|a, b| a + b)
}

async fn fetch(url: &str) -> Result<String, LoadError> {
    let trouble = |what: String| LoadError::program(url, what);
    let target = Target::parse(url)?;
    let mut request = hyper::Request::new(Full::new(Bytes::new()));
    let path = url
        .parse::<hyper::Uri>()
        .ok()
        .map(|uri| uri.path().to_owned());
    *request.uri_mut() = path.unwrap_or_default().parse().unwrap_or_default();
    if let Ok(host) = target.authority().parse() {
        request.headers_mut().insert("host", host);
    }
    let mut connection = Connection::new(&target);
    let response = connection.send(request).await;
    let response = response.map_err(|failure| trouble(format!("{failure:?}")))?;
    let body = response.into_body().collect().await;
    let bytes = body.map_err(|error| trouble(error.to_string()))?.to_bytes();
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
