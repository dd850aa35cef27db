use axum::http::HeaderValue;

use super::*;

fn key(text: &str) -> Key {
    Key::new(text).unwrap()
}

fn bearer(text: &str) -> HeaderMap {
    let value = HeaderValue::from_str(&format!("Bearer {text}")).unwrap();
    HeaderMap::from_iter([(axum::http::header::AUTHORIZATION, value)])
}

fn alice_and_bob() -> Vec<TenantRules> {
    let text = r#"
        [[tenant]]
        name = "alice"
        key = "alice-key"
        strictest_fidelity = "int8"
        loosest_fidelity = "int4"
        max_priority = -1
        [[tenant]]
        name = "bob"
        key = "bob-key"
    "#;
    parse_tenants(text, |_| None).unwrap()
}

fn served(api: &[&str], admin: Option<&str>, tenants: Vec<TenantRules>) -> Access {
    let api_keys = api.iter().map(|text| key(text)).collect();
    let settings = AccessSettings {
        api_keys,
        admin_key: admin.map(key),
        tenants,
        is_loopback: true,
        ..AccessSettings::default()
    };
    Access::new(settings).unwrap()
}

fn status<T: std::fmt::Debug>(result: Result<T, ApiError>) -> u16 {
    result.map_or_else(|error| error.status.as_u16(), |_| 200)
}

#[test]
fn without_keys_everything_is_open_and_any_key_is_ignored() {
    let access = Access::default();
    for headers in [HeaderMap::new(), bearer("EMPTY")] {
        let caller = access.caller(&headers).unwrap();
        assert_eq!((caller.tenant, &*caller.tenant_name), (0, "default"));
        assert!(caller.admin && !caller.keyed);
        assert_eq!(status(access.admin(&headers)), 200);
    }
}

#[test]
fn an_admin_key_alone_closes_only_what_is_the_admins() {
    let access = served(&[], Some("root"), Vec::new());
    assert_eq!(status(access.caller(&HeaderMap::new())), 200);
    assert_eq!(status(access.admin(&HeaderMap::new())), 401);
    assert_eq!(status(access.admin(&bearer("EMPTY"))), 401);
    assert_eq!(status(access.admin(&bearer("root"))), 200);
}

#[test]
fn with_keys_each_opens_what_it_is_for() {
    let access = served(&["api"], Some("root"), alice_and_bob());
    assert_eq!(status(access.caller(&HeaderMap::new())), 401);
    assert_eq!(status(access.caller(&bearer("nobody"))), 401);
    assert_eq!(status(access.caller(&bearer("alice-ke"))), 401);
    let who = |text| {
        let caller = access.caller(&bearer(text)).unwrap();
        (caller.tenant, caller.tenant_name.to_string(), caller.admin, caller.keyed)
    };
    assert_eq!(who("api"), (0, "default".into(), false, true));
    assert_eq!(who("alice-key"), (1, "alice".into(), false, true));
    assert_eq!(who("bob-key"), (2, "bob".into(), false, true));
    assert_eq!(who("root"), (0, "default".into(), true, true));
    assert_eq!(status(access.admin(&HeaderMap::new())), 401);
    assert_eq!(status(access.admin(&bearer("api"))), 403);
    assert_eq!(status(access.admin(&bearer("bob-key"))), 403);
    assert_eq!(status(access.admin(&bearer("root"))), 200);
    // Without an admin key nobody is the admin.
    let closed = served(&["api"], None, Vec::new());
    let error = closed.admin(&bearer("api")).unwrap_err();
    assert_eq!(error.status.as_u16(), 403);
    assert!(error.message.contains("--admin-key"));
}

#[test]
fn a_key_has_one_holder() {
    let twice = |api: &[&str], admin: Option<&str>| {
        let settings = AccessSettings {
            api_keys: api.iter().map(|text| key(text)).collect(),
            admin_key: admin.map(key),
            tenants: alice_and_bob(),
            ..AccessSettings::default()
        };
        Access::new(settings).unwrap_err().to_string()
    };
    assert!(twice(&["bob-key"], None).contains("tenant `bob` is also that of `default`"));
    assert!(twice(&["root"], Some("root")).contains("--api-key is also that of `the admin`"));
}

#[test]
fn only_the_admin_acts_for_others() {
    let access = served(&[], Some("root"), alice_and_bob());
    let alice = access.caller(&bearer("alice-key")).unwrap();
    let admin = access.caller(&bearer("root")).unwrap();
    assert_eq!(access.tenant(&alice, None).unwrap(), 1);
    assert_eq!(access.tenant(&alice, Some("alice")).unwrap(), 1);
    assert_eq!(status(access.tenant(&alice, Some("bob"))), 403);
    // Whether a name exists is not told to those who may not use it.
    assert_eq!(status(access.tenant(&alice, Some("carol"))), 403);
    assert_eq!(access.tenant(&admin, Some("bob")).unwrap(), 2);
    assert_eq!(status(access.tenant(&admin, Some("carol"))), 400);
    let open = Access::default();
    let anyone = open.caller(&HeaderMap::new()).unwrap();
    assert_eq!(open.tenant(&anyone, Some("default")).unwrap(), 0);
    assert_eq!(status(open.tenant(&anyone, Some("alice"))), 400);
}

#[test]
fn what_is_left_open_stays_within_bounds_and_what_is_asked_beyond_is_refused() {
    let access = served(&[], None, alice_and_bob());
    let permit = |tenant, fidelity, priority| {
        access.permit(tenant, fidelity, Fidelity::Evict, priority).map_err(|error| error.message)
    };
    assert_eq!(permit(1, None, None), Ok((Fidelity::Int4, -1)));
    assert_eq!(permit(1, Some(Fidelity::Int8), Some(-5)), Ok((Fidelity::Int8, -5)));
    let error = permit(1, Some(Fidelity::Exact), None).unwrap_err();
    assert!(error.contains("kv.fidelity is exact") && error.contains("bound is int8"), "{error}");
    let error = permit(1, Some(Fidelity::Evict), None).unwrap_err();
    assert!(error.contains("bound is int4"), "{error}");
    let error = permit(1, None, Some(0)).unwrap_err();
    assert!(error.contains("kv.priority is 0") && error.contains("bound is -1"), "{error}");
    assert_eq!(permit(2, Some(Fidelity::Exact), Some(9)), Ok((Fidelity::Exact, 9)));
    assert_eq!(permit(2, None, None), Ok((Fidelity::Evict, 0)));
}

#[test]
fn the_file_may_describe_the_default_tenant() {
    let text = "[[tenant]]\nname = \"b\"\n[[tenant]]\nname = \"default\"\nweight = 3";
    let access = served(&["api"], None, parse_tenants(text, |_| None).unwrap());
    let tenants = access.engine_tenants();
    let named: Vec<_> = tenants.iter().map(|t| (t.name.as_str(), t.weight)).collect();
    assert_eq!(named, [("default", 3.0), ("b", 1.0)]);
    assert_ne!(tenants[0].salt, tenants[1].salt);
}

#[test]
fn others_reach_a_keyless_server_only_where_that_was_said() {
    let open = Access::default();
    let keyed = served(&["api"], None, Vec::new());
    let admin_only = served(&[], Some("root"), Vec::new());
    for host in ["127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"] {
        assert_eq!(check_exposure(host.parse().unwrap(), &open, false), Ok(()), "{host}");
    }
    for host in ["0.0.0.0", "::", "192.168.1.2", "::ffff:10.0.0.1"] {
        let host = host.parse().unwrap();
        let error = check_exposure(host, &open, false).unwrap_err();
        assert!(error.to_string().contains("--insecure"));
        assert!(check_exposure(host, &admin_only, false).is_err());
        assert_eq!(check_exposure(host, &open, true), Ok(()));
        assert_eq!(check_exposure(host, &keyed, false), Ok(()));
    }
}
