//! How does a test tell a simulated node what goes wrong, and see what it did?
//!
//! An address of its own, beside the nodes': `GET /nodes` lists them with what they count,
//! `POST /nodes/ID/fault` takes a fault as the command line writes it. A real node has no such
//! thing, and a node that is being restarted could not answer.

use std::sync::Arc;

use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::{Method, Request, Response, StatusCode};
use serde_json::json;

use super::faults::Fault;
use super::slot::Slot;
use crate::node_http::{Body, Cut, error, json_response};

/// The control address.
#[derive(Clone)]
pub(super) struct Control {
    slots: Arc<[Arc<Slot>]>,
}

impl Control {
    pub(super) fn new(slots: Vec<Arc<Slot>>) -> Self {
        Self {
            slots: slots.into(),
        }
    }

    /// Answers one request.
    pub(super) async fn answer(self, request: Request<Incoming>) -> Result<Response<Body>, Cut> {
        let path = request.uri().path().to_owned();
        let steps: Vec<&str> = path.split('/').skip(1).collect();
        match (request.method(), steps.as_slice()) {
            (&Method::GET, ["nodes"]) => {
                let reports: Vec<_> = self.slots.iter().map(|slot| slot.report()).collect();
                Ok(json_response(StatusCode::OK, &json!({"nodes": reports})))
            }
            (&Method::POST, ["nodes", id, "fault"]) => {
                let body = request.into_body().collect().await.map_err(|_| Cut)?;
                let text = String::from_utf8_lossy(&body.to_bytes()).trim().to_owned();
                self.order(id, &text).await
            }
            _ => Ok(refused(
                StatusCode::NOT_FOUND,
                "there are GET /nodes and POST /nodes/ID/fault",
            )),
        }
    }

    async fn order(&self, id: &str, fault: &str) -> Result<Response<Body>, Cut> {
        let Some(slot) = self.slots.iter().find(|slot| slot.id() == id) else {
            return Ok(refused(StatusCode::NOT_FOUND, "no node of that name"));
        };
        match fault.parse::<Fault>() {
            Ok(Fault::Restart(pause)) => slot.restart(pause).await,
            Ok(fault) => slot.suffer(fault),
            Err(unknown) => return Ok(refused(StatusCode::BAD_REQUEST, &unknown.to_string())),
        }
        Ok(json_response(
            StatusCode::OK,
            &json!({"node": id, "fault": fault}),
        ))
    }
}

fn refused(status: StatusCode, why: &str) -> Response<Body> {
    json_response(status, &error(why, None))
}
