//! Keys prove their tenant, in this process and after changes by another.

use super::*;

fn open(dir: &Path) -> Arc<Store> {
    Store::open(dir).unwrap()
}

/// Would catch a key stored in plain, or one that outlives its revocation in its own process.
#[test]
fn keys_prove_their_tenant_until_revoked() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let demo = TenantId::new("demo").unwrap();
    assert!(matches!(
        store.create_key(&demo),
        Err(StoreError::NoTenant(_))
    ));
    store.create_tenant(&demo, Debug::Permitted).unwrap();
    assert!(matches!(
        store.create_tenant(&demo, Debug::Refused),
        Err(StoreError::TenantExists(_))
    ));
    let key = store.create_key(&demo).unwrap();
    assert_eq!(key.secret.len(), "sk-homing-".len() + 43);
    let identity = store.identify(&key.secret).unwrap();
    assert_eq!(
        (&*identity.key_id, identity.tenant.debug),
        (key.id.as_str(), true)
    );
    for wrong in ["", "sk-homing-", &key.secret[..50], &key.id, "sk-homing-é"] {
        assert!(store.identify(wrong).is_none(), "{wrong}");
    }
    for file in std::fs::read_dir(dir.path()).unwrap() {
        let bytes = std::fs::read(file.unwrap().path()).unwrap();
        let needle = key.secret.as_bytes();
        assert!(!bytes.windows(needle.len()).any(|window| window == needle));
    }
    store.revoke_key(&key.id).unwrap();
    assert!(store.identify(&key.secret).is_none());
    assert!(matches!(
        store.revoke_key("key_none"),
        Err(StoreError::NoKey(_))
    ));
    assert!(store.keys().unwrap()[0].revoked_ms.is_some());
}

/// Would catch a gateway that honours a key for longer than a second after its revocation.
#[tokio::test]
async fn another_process_is_noticed_within_a_second() {
    let dir = tempfile::tempdir().unwrap();
    let (here, there) = (open(dir.path()), open(dir.path()));
    let tasks = Tasks::new(tokio::runtime::Handle::current());
    here.watch(&tasks);
    let demo = TenantId::new("demo").unwrap();
    there.create_tenant(&demo, Debug::Refused).unwrap();
    let key = there.create_key(&demo).unwrap();
    let within_a_second = async |known: bool| {
        let reached = async {
            while here.identify(&key.secret).is_some() != known {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(1), reached)
            .await
            .unwrap();
    };
    within_a_second(true).await;
    there.revoke_key(&key.id).unwrap();
    within_a_second(false).await;
    tasks.advance(Phase::Stopping);
    assert_eq!(tasks.finished(Duration::from_secs(5)).await, 0);
}

/// Would catch key material that others on the machine can read.
#[test]
fn files_are_private() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let store = open(&data);
    store
        .create_tenant(&TenantId::new("demo").unwrap(), Debug::Refused)
        .unwrap();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&data), 0o700);
    for file in std::fs::read_dir(&data).unwrap() {
        assert_eq!(mode(&file.unwrap().path()), 0o600);
    }
}

/// Would catch a name that breaks a metric label, a report or a path.
#[test]
fn tenant_names_are_checked() {
    let long = "x".repeat(65);
    for (name, allowed) in [
        ("demo", true),
        ("A.b-c_9", true),
        ("", false),
        ("a b", false),
        ("é", false),
        ("a\"b", false),
        (long.as_str(), false),
    ] {
        assert_eq!(TenantId::new(name).is_ok(), allowed, "{name}");
    }
}
