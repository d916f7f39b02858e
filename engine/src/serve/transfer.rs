//! Where does this node give its KV out, and how does it fetch others'?
//!
//! Only where there is a node token, by which nodes know each other. A TCP port as told, and a Unix socket
//! for nodes on this host, in a folder that nobody but this user can enter.

use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use super::ServeError;
use crate::cli::Config;
use crate::engine::Handle;
use crate::kv::layout::BlockLayout;
use crate::kv::transfer::auth::Identity;
use crate::kv::transfer::client::{self, Order};
use crate::kv::transfer::message::Layout;
use crate::kv::transfer::server::Desk;
use crate::kv::transfer::{Endpoint, TRANSFERS_MAX};
use crate::server::role::KvNode;

/// What is bound before the model is loaded.
pub(super) struct KvSockets {
    tcp: TcpListener,
    unix: UnixListener,
    /// Removed with this.
    folder: Folder,
    endpoints: Vec<String>,
}

impl KvSockets {
    /// None where nodes cannot know each other.
    pub(super) fn bind(config: &Config) -> Result<Option<Self>, ServeError> {
        if config.token.is_none() {
            return Ok(None);
        }
        let address = config.kv_listen;
        let listen = |source| ServeError::Listen { address, source };
        let tcp = TcpListener::bind(address).map_err(listen)?;
        let bound: SocketAddr = tcp.local_addr().map_err(listen)?;
        let what = "cannot open a socket for other nodes' KV transfers";
        let system = |source| ServeError::System { what, source };
        let folder = Folder::new().map_err(system)?;
        let path = folder.0.join("kv.sock");
        let unix = UnixListener::bind(&path).map_err(system)?;
        let endpoints = [Endpoint::Unix(path), Endpoint::Tcp(bound)];
        Ok(Some(Self {
            tcp,
            unix,
            folder,
            endpoints: endpoints.iter().map(Endpoint::to_string).collect(),
        }))
    }
}

/// A folder of this user's own, which lasts as long as the node.
pub(super) struct Folder(PathBuf);

impl Folder {
    fn new() -> std::io::Result<Self> {
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let parent = runtime
            .filter(|dir| dir.is_dir())
            .unwrap_or_else(std::env::temp_dir);
        let name = format!("homing-kv-{}", uuid::Uuid::new_v4().simple());
        let path = parent.join(name);
        std::fs::DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self(path))
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left of it is an empty socket.
        let _ = std::fs::remove_dir_all(self.path());
    }
}

/// The engine's end of a channel, and the other.
pub(super) fn orders() -> (SyncSender<Order>, Receiver<Order>) {
    sync_channel(TRANSFERS_MAX)
}

/// What the node tells of its KV, and what it needs to give it out.
pub(super) struct KvParts {
    pub(super) layout: BlockLayout,
    pub(super) model: [u8; 32],
    pub(super) engine_id: String,
    pub(super) orders: Receiver<Order>,
}

/// Starts to give out and to fetch, where there are sockets. The folder must be kept.
pub(super) fn start(
    config: &Config,
    sockets: Option<KvSockets>,
    parts: KvParts,
    engine: &Handle,
) -> Result<(KvNode, Option<Folder>), ServeError> {
    let mut node = KvNode {
        role: config.role,
        endpoints: Vec::new(),
        layout: serde_json::to_value(Layout::new(&parts.layout)).unwrap_or_default(),
    };
    let Some((sockets, token)) = sockets.zip(config.token.as_ref()) else {
        return Ok((node, None));
    };
    let identity = Identity {
        engine_id: parts.engine_id,
        layout: parts.layout,
        model: parts.model,
        key: token.transfer_key(),
    };
    let what = "cannot start the threads of KV transfers";
    let system = |source| ServeError::System { what, source };
    let model_id = Arc::from(config.model_id.as_str());
    let desk = Desk::new(identity.clone(), model_id, engine.clone());
    desk.serve_tcp(sockets.tcp).map_err(system)?;
    desk.serve_unix(sockets.unix).map_err(system)?;
    client::start(parts.orders, identity, engine.clone()).map_err(system)?;
    node.endpoints = sockets.endpoints;
    Ok((node, Some(sockets.folder)))
}
