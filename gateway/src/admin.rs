//! What can an operator ask the gateway?
//!
//! `/metrics` (Prometheus text), `/health` (200 while at least one node takes requests and the
//! gateway is not leaving), `/admin/nodes` (JSON: how each node is and what it is believed to
//! hold) and `/admin/decisions` (JSON: why the last turns went where they went; one of them behind
//! a `/` and its request id), on a listener of their own, so that no client's port ever answers
//! them. Read only.
//!
//! Left out on purpose: authentication. The address is loopback unless the operator says otherwise,
//! and nothing here is secret to the machine's own users; prompts and keys are not shown.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use cache_index::tiers::Tiers;
use cache_index::trust::Trust;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use policies::view::NodeState;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use crate::decisions::Decisions;
use crate::fleet::{Fleet, Node};
use crate::metrics::Metrics;
use crate::tasks::{Drain, Phase, Tasks};

/// Connections at once; a scraper needs one.
const CONNECTIONS_MAX: usize = 64;

/// Longest wait for a request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// What the answers are made from.
pub struct Admin {
    /// The nodes.
    pub fleet: Arc<Fleet>,
    /// The counters.
    pub metrics: Arc<Metrics>,
    /// Why turns went where they went.
    pub(crate) decisions: Arc<Decisions>,
    /// Whether the gateway is leaving.
    pub drain: Drain,
}

/// Answers on `listener` until the process stops (while draining it still answers).
pub async fn serve(listener: TcpListener, admin: Arc<Admin>, tasks: Tasks) {
    let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = admin.drain.reached(Phase::Stopping) => return,
        };
        let (Ok((stream, _)), Ok(permit)) = (accepted, Arc::clone(&permits).try_acquire_owned())
        else {
            // Out of descriptors or of permits: not a reason to spin.
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let admin = Arc::clone(&admin);
        tasks.spawn("admin-connection", async move {
            let _permit = permit;
            let answering = service_fn(|request| {
                let answer = answer(&admin, &request);
                async move { Ok::<_, Infallible>(answer) }
            });
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_TIMEOUT)
                .serve_connection(TokioIo::new(stream), answering);
            tokio::select! {
                // A client that breaks off is its own business.
                _ = connection => {}
                () = admin.drain.reached(Phase::Stopping) => {}
            }
        });
    }
}

fn answer(admin: &Admin, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    if request.method() != Method::GET {
        return text(StatusCode::METHOD_NOT_ALLOWED, "only GET\n");
    }
    match request.uri().path() {
        "/metrics" => match admin.metrics.render() {
            Ok(metrics) => text(StatusCode::OK, metrics),
            Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
        },
        "/health" => health(admin),
        "/admin/nodes" => {
            let nodes = admin.fleet.nodes();
            let rows: Vec<Value> = nodes.iter().map(|node| row(&admin.fleet, node)).collect();
            as_json(StatusCode::OK, &json!({ "nodes": rows }))
        }
        path => decisions(admin, path, request.uri().query()).unwrap_or_else(|| {
            text(
                StatusCode::NOT_FOUND,
                "there are /metrics, /health, /admin/nodes, /admin/decisions and /admin/decisions/REQUEST-ID\n",
            )
        }),
    }
}

/// The last decisions, or those of one request; none for another path.
fn decisions(admin: &Admin, path: &str, query: Option<&str>) -> Option<Response<Full<Bytes>>> {
    /// Decisions in one answer where the query does not say.
    const SHOWN: usize = 20;
    let rest = path.strip_prefix("/admin/decisions")?;
    let found = match rest.strip_prefix('/') {
        None if rest.is_empty() => {
            let pairs = query.unwrap_or_default().split('&');
            let mut limits = pairs.filter_map(|pair| pair.strip_prefix("limit="));
            let limit = limits.next().map_or(Ok(SHOWN), str::parse);
            let Ok(limit) = limit else {
                let message = "limit is how many of the last decisions are wanted: a number\n";
                return Some(text(StatusCode::BAD_REQUEST, message));
            };
            admin.decisions.recent(limit)
        }
        Some(id) if !id.is_empty() => admin.decisions.find(id),
        _ => return None,
    };
    let status = if found.is_empty() && !rest.is_empty() {
        StatusCode::NOT_FOUND
    } else {
        StatusCode::OK
    };
    let found: Vec<_> = found.iter().map(|decided| &**decided).collect();
    Some(as_json(status, &json!({ "decisions": found })))
}

fn health(admin: &Admin) -> Response<Full<Bytes>> {
    let nodes = admin.fleet.nodes();
    let up = nodes
        .iter()
        .filter(|node| node.state() == NodeState::Up)
        .count();
    let leaving = admin.drain.phase() != Phase::Running;
    let (status, word) = match (leaving, up) {
        (true, _) => (StatusCode::SERVICE_UNAVAILABLE, "draining"),
        (false, 0) => (StatusCode::SERVICE_UNAVAILABLE, "no node takes requests"),
        (false, _) => (StatusCode::OK, "ok"),
    };
    as_json(
        status,
        &json!({ "status": word, "nodes_up": up, "nodes": nodes.len() }),
    )
}

fn row(fleet: &Fleet, node: &Node) -> Value {
    let view = node.view(Tiers::default());
    let (state, why) = match view.state {
        NodeState::Up => ("up", None),
        NodeState::Down { why } => ("down", Some(why)),
        NodeState::Draining => ("draining", None),
        NodeState::BreakerOpen => ("breaker_open", None),
    };
    let trust = match node.trust() {
        Trust::Exact => "exact",
        Trust::Partial => "partial",
        Trust::Unknown => "unknown",
    };
    json!({
        "id": node.id.as_str(),
        "url": format!("http://{}", node.addr),
        "region": view.region,
        "role": view.role.as_str(),
        "kv_transfer_bytes_per_s": view.handover.map(|handover| handover.bytes_per_s),
        "model": node.model().as_deref(),
        "state": state,
        "why": why,
        "requests_in_flight": node.requests_in_flight(),
        "prefill_tokens_in_flight": view.inflight_prefill_tokens,
        "decode_tokens_in_flight": view.inflight_decode_tokens,
        "prefill_tokens_per_s": view.prefill_tokens_per_s,
        "index_blocks": fleet.held_blocks(node),
        "trust": trust,
        "pool_blocks": view.pool_blocks,
        "pool_used_blocks": view.pool_used_blocks,
        "round_trip_ms": view.round_trip_ms,
        "context_max": view.context_max,
    })
}

fn as_json(status: StatusCode, value: &Value) -> Response<Full<Bytes>> {
    reply(status, "application/json", format!("{value}\n"))
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    reply(status, "text/plain; version=0.0.4; charset=utf-8", body)
}

fn reply(
    status: StatusCode,
    content_type: &'static str,
    body: impl Into<Bytes>,
) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static(content_type),
    );
    response
}
