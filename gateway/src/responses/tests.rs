//! Catches a store that forgets what it promised to keep, keeps what it promised to forget, shows
//! one tenant what another has, or answers otherwise than a list in memory would.

mod memory;

use std::sync::{Arc, Mutex};

use policies::view::SessionKey;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::value::RawValue;

use super::running::Running;
use super::sqlite::{Bounds, Sqlite};
use super::store::{
    Conversation, Finished, Item, Kept, KeptSession, Link, Order, ResponseStore, Span,
};
use super::{Answered, Keep, Keeping, Responses};
use crate::session::SessionId;
use crate::store::TenantId;
use memory::Memory;

const BOUNDS: Bounds = Bounds {
    ttl_ms: 500,
    rows_per_tenant: 12,
    bytes_per_tenant: 4000,
};

fn raw(json: &str) -> Box<RawValue> {
    RawValue::from_string(json.to_owned()).expect("JSON")
}

fn kept(t_ms: i64, text: &str) -> Arc<Kept> {
    Arc::new(Kept {
        t_ms,
        continues: Some(Link::Response("resp_0".to_owned())),
        session: KeptSession {
            key: "1f".to_owned(),
            text: "s".to_owned(),
        },
        response: raw("{}"),
        input: raw(&format!("[\"{text}\"]")),
        output: raw("[]"),
    })
}

fn tenant(name: &str) -> TenantId {
    TenantId::new(name).expect("a name")
}

/// One of few names, so that operations meet each other's objects. Names that are taken again are
/// new ones: a store may still hold a row whose time is over.
fn few(random: &mut StdRng, prefix: &str, now_ms: i64) -> String {
    format!("{prefix}_{}_{}", now_ms / 200, random.random_range(0..4))
}

fn items(random: &mut StdRng) -> Vec<Item> {
    let count = random.random_range(0..4);
    let item = |_| Item {
        id: few(random, "msg", 0),
        json: format!("{{\"n\":{}}}", "1".repeat(random.random_range(1..60))),
    };
    (0..count).map(item).collect()
}

/// One random operation, on both, with what it came to as text.
async fn step(store: &dyn ResponseStore, operation: u32, chance: u64, now_ms: i64) -> String {
    let random = &mut StdRng::seed_from_u64(chance);
    let tenant = tenant(["a", "b"][random.random_range(0..2)]);
    let (response, conversation) = (few(random, "resp", now_ms), few(random, "conv", now_ms));
    let item = few(random, "msg", 0);
    match operation {
        0 | 1 => {
            let text = "x".repeat(random.random_range(1..500));
            let append = random
                .random_bool(0.5)
                .then(|| (conversation, items(random)));
            let left = Finished {
                response: Some((response, kept(now_ms, &text))),
                append,
            };
            format!("{:?}", store.finish(&tenant, left, now_ms).await.is_ok())
        }
        2 => {
            let found = store
                .response(&tenant, &response, now_ms)
                .await
                .expect("an answer");
            format!(
                "{:?} {response}",
                found.map(|kept| kept.input.get().to_owned())
            )
        }
        3 => {
            format!(
                "{:?}",
                store.remove_response(&tenant, &response, now_ms).await
            )
        }
        4 => {
            let new = Conversation {
                id: conversation,
                created_s: 1,
                metadata: "{}".to_owned(),
            };
            format!(
                "{:?}",
                store.create(&tenant, new, items(random), now_ms).await
            )
        }
        other => {
            on_conversation(
                store,
                other,
                (random, &tenant, &conversation, &item),
                now_ms,
            )
            .await
        }
    }
}

async fn on_conversation(
    store: &dyn ResponseStore,
    operation: u32,
    (random, tenant, id, item): (&mut StdRng, &TenantId, &str, &str),
    now_ms: i64,
) -> String {
    match operation {
        5 => format!("{:?}", store.conversation(tenant, id, now_ms).await),
        6 => {
            let metadata = format!("{{\"a\":\"{now_ms}\"}}");
            format!(
                "{:?}",
                store.set_metadata(tenant, id, metadata, now_ms).await
            )
        }
        7 => format!("{:?}", store.remove_conversation(tenant, id, now_ms).await),
        8 => format!(
            "{:?}",
            store.append(tenant, id, items(random), now_ms).await
        ),
        9 => {
            let order = [Order::Ascending, Order::Descending][random.random_range(0..2)];
            let span = Span {
                before: random.random_range(1..20),
                after: random.random_range(0..5),
                most: random.random_range(1..5),
                order,
            };
            format!("{:?}", store.items(tenant, id, span, now_ms).await)
        }
        10 => format!("{:?}", store.item(tenant, id, item, now_ms).await),
        11 => format!("{:?}", store.remove_item(tenant, id, item, now_ms).await),
        _ => format!("{:?}", store.expire(now_ms).await),
    }
}

#[tokio::test]
async fn sqlite_is_a_list_in_memory_that_survives() {
    for seed in 0..6 {
        let dir = tempfile::tempdir().expect("a directory");
        let mut sqlite = Sqlite::open(dir.path(), BOUNDS).expect("a store");
        let memory = Memory::new(BOUNDS);
        let mut random = StdRng::seed_from_u64(seed);
        let (mut now_ms, mut answers) = (1000, std::collections::HashSet::new());
        for at in 0..600 {
            now_ms += 10 * random.random_range(0..2);
            let operation = random.random_range(0..13);
            let chance: u64 = random.random();
            let real = step(&sqlite, operation, chance, now_ms).await;
            let expected = step(&memory, operation, chance, now_ms).await;
            assert_eq!(
                real, expected,
                "seed {seed}, step {at}, operation {operation}"
            );
            answers.insert(real);
            if random.random_bool(0.01) {
                // Another process, with nothing in memory.
                sqlite.close();
                sqlite = Sqlite::open(dir.path(), BOUNDS).expect("the same store");
            }
        }
        assert!(answers.len() > 40, "most operations found nothing");
    }
}

#[tokio::test]
async fn a_damaged_database_is_begun_anew() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("responses.db");
    std::fs::write(&path, "no database ".repeat(1000)).expect("a file");
    let store = Sqlite::open(dir.path(), BOUNDS).expect("a new one");
    let left = Finished {
        response: Some(("resp_1".to_owned(), kept(1, "x"))),
        append: None,
    };
    let tenant = tenant("a");
    store.finish(&tenant, left, 1).await.expect("it takes it");
    let found = store
        .response(&tenant, "resp_1", 2)
        .await
        .expect("an answer");
    assert!(found.is_some());
    let aside = std::fs::read_dir(dir.path()).expect("a directory");
    let aside = aside.filter_map(Result::ok).any(|file| {
        let name = file.file_name();
        name.to_string_lossy().contains("damaged")
    });
    assert!(aside, "the damaged one is gone");
}

/// Catches a client that has read the end of its turn, and is told that the turn is still being made.
#[tokio::test]
async fn a_conversation_is_free_once_its_turn_is_kept() {
    let dir = tempfile::tempdir().expect("a directory");
    let sqlite = Arc::new(Sqlite::open(dir.path(), BOUNDS).expect("a store"));
    let responses = Responses {
        store: Arc::clone(&sqlite) as _,
        sqlite,
        history_bytes_max: 1000,
        held: Arc::default(),
        running: Running::default(),
    };
    let tenant = tenant("a");
    let hold = || responses.hold(&tenant, "conv_1");
    let keeping = Keeping {
        tenant: tenant.clone(),
        keep: Keep::Yes,
        continues: Some(Link::Conversation {
            id: "conv_1".to_owned(),
            before: 0,
        }),
        local: None,
        turn: responses.running.begin(&tenant, "resp_1"),
        held: Mutex::new(hold().ok()),
    };
    assert!(hold().is_err(), "two turns at once");
    let session = SessionId {
        key: SessionKey(1),
        text: "s".to_owned(),
    };
    let answered = Answered {
        id: "resp_1".to_owned(),
        response: serde_json::json!({"status": "completed"}),
        input: Vec::new(),
        output: Vec::new(),
        continues: None,
    };
    responses.keep(&keeping, &session, answered).await;
    // The turn itself goes on: its last bytes are about to be written.
    assert!(hold().is_ok());
    drop(keeping);
}
