//! The real routes behind the real accept loop, over an engine that says what was written down.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use reef_server::access::{Access, AccessSettings, Key, TenantRules};
use reef_server::door::Door;
use reef_server::lifecycle::{Limits, Stop, Stopper, bind, serve};
use reef_server::{App, Settings, http};
use serde_json::Value;

use crate::raw::{Answer, Raw};
use crate::support::{Script, ScriptedDoor, tiny_model};

/// A running server; it stops when this is dropped.
pub struct Served {
    pub address: SocketAddr,
    pub app: Arc<App>,
    pub stopper: Stopper,
}

/// Limits that a test can wait for.
pub fn short() -> Limits {
    Limits {
        head_timeout: Duration::from_millis(400),
        body_timeout: Duration::from_millis(400),
        drain_timeout: Duration::from_millis(50),
        ..Limits::default()
    }
}

impl Served {
    /// Without keys, with an engine that says `ok`.
    pub async fn open() -> Served {
        Served::scripted(Access::default()).await
    }

    /// The same, that closes quiet connections soon: a client reads until then.
    pub async fn impatient() -> Served {
        let limits = Limits { idle_timeout: Duration::from_millis(200), ..short() };
        let door = Arc::new(ScriptedDoor::new(Script::says("ok")));
        Served::start(door, Access::default(), limits).await
    }

    /// With `access`.
    pub async fn scripted(access: Access) -> Served {
        Served::with(Arc::new(ScriptedDoor::new(Script::says("ok"))), access).await
    }

    /// With any engine.
    pub async fn with(door: Arc<dyn Door>, access: Access) -> Served {
        Served::start(door, access, short()).await
    }

    async fn start(door: Arc<dyn Door>, access: Access, limits: Limits) -> Served {
        let settings = Settings { body_bytes_max: 4 << 20, ..Settings::new("tiny") };
        let app = Arc::new(App::guarded(settings, access, limits));
        app.set_model(tiny_model(door));
        let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let (stopper, stop) = Stop::told();
        let router = http::router(app.clone());
        tokio::spawn(serve(listener, router, app.lifecycle.clone(), stop));
        Served { address, app, stopper }
    }

    /// Asks with a JSON body on a connection of its own.
    pub async fn post(&self, path: &str, headers: &str, body: &Value) -> Answer {
        self.post_bytes(path, headers, body.to_string().as_bytes()).await
    }

    /// The same with any bytes.
    pub async fn post_bytes(&self, path: &str, headers: &str, body: &[u8]) -> Answer {
        let mut raw = Raw::connect(self.address).await;
        let length = body.len();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\n{headers}content-length: {length}\r\n\r\n"
        );
        raw.say(&head).await;
        // A refusal may come before the body's end.
        raw.try_send(body).await;
        raw.answer().await
    }

    /// Asks for a path.
    pub async fn get(&self, path: &str, headers: &str) -> Answer {
        let mut raw = Raw::connect(self.address).await;
        raw.say(&format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n")).await;
        raw.answer().await
    }

    /// Still there.
    pub async fn assert_is_ready(&self) {
        assert_eq!(self.get("/health", "").await.status, 200);
    }

    /// Still there, and still right.
    pub async fn assert_well(&self) {
        self.assert_is_ready().await;
        let counts = self.app.lifecycle.traffic.counts();
        assert_eq!((counts.panics, counts.body_bytes), (0, 0));
    }
}

/// Keys and tenants of a server.
pub fn access(api: &[&str], admin: Option<&str>, tenants: Vec<TenantRules>) -> Access {
    let key = |text: &&str| Key::new(text).unwrap();
    Access::new(AccessSettings {
        api_keys: api.iter().map(key).collect(),
        admin_key: admin.as_ref().map(key),
        tenants,
        is_loopback: true,
        ..AccessSettings::default()
    })
    .unwrap()
}
