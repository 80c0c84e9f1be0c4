//! What a configuration may say, and what is refused with which words.

use super::*;

const PEERS: &str = "[peers]\nlisten = '127.0.0.1:7600'\n";
const METRICS: &str = "[metrics]\nlisten = '127.0.0.1:9310'\n";
const LEAST: &str = "socket = '/run/node.sock'\n[memory]\nsize = '1GiB'\n";

#[test]
fn what_is_printed_is_read_as_the_same() {
    let ssd = "[[ssd]]\npath = '/data/log'\nsize = '100GiB'\n";
    let config = NodeConfig::from_toml(&format!("{LEAST}{ssd}")).unwrap();
    let peers = "[peers]\nlisten = '127.0.0.1:7600'\n[directory]\nfile = 'nodes.toml'\n\
            [[peers.rails]]\nfabric = 'rdma'\ndevices = ['mlx5_0:1']\n";
    let tenants = "[tenants]\nmemory = '512MiB'\n[[tenants.quotas]]\ntenant = 7\nssd = '1GiB'\n";
    let push = "[metrics]\nlisten = '127.0.0.1:9310'\n[metrics.push]\nendpoint = 'http://collector:4318'\n";
    let all = format!("{}{peers}{tenants}{push}", config.to_toml());
    let config = NodeConfig::from_toml(&all).unwrap();
    assert_eq!(NodeConfig::from_toml(&config.to_toml()).unwrap().to_toml(), config.to_toml());
    assert!(config.to_toml().contains("lease_s = 60"), "{}", config.to_toml());
}

#[test]
fn a_token_that_is_too_long_for_peers_is_refused_where_it_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let (file, token) = (folder.path().join("node.toml"), folder.path().join("token"));
    std::fs::write(&file, format!("{LEAST}{PEERS}token_file = '{}'\n", token.display())).unwrap();
    std::fs::write(&token, "x".repeat(256)).unwrap();
    assert!(NodeConfig::read(&file).is_ok());
    std::fs::write(&token, "x".repeat(257)).unwrap();
    let refused = NodeConfig::read(&file).unwrap_err().to_string();
    assert!(refused.contains("the token is 257; allowed is 1 to 256"), "{refused}");
}

#[test]
fn peers_may_be_beyond_loopback_in_plain_text_that_is_asked_for_or_with_tls() {
    let (plain, tls) =
        ("plain_beyond_loopback = true\n", "certificate = 'c'\nkey = 'k'\nauthorities = 'a'\n");
    for more in [plain, tls] {
        for listen in ["listen = '10.0.0.1:7600'", "listen = '0.0.0.0:7600'\nadvertise = '10.0.0.1:7600'"] {
            let text = format!("{LEAST}[peers]\n{listen}\n{more}");
            assert!(NodeConfig::from_toml(&text).is_ok(), "{text}");
        }
    }
}

#[test]
fn what_is_printed_is_what_will_be_used() {
    let text = "socket = 'x'\n[memory]\nsize = '1GiB'\n[[ssd]]\npath = 'no/such/log'\nsize = '1.5GiB'\n";
    let shown = NodeConfig::from_toml(text).unwrap().effective();
    assert_eq!((shown.memory.largest_chunk, shown.ssd[0].segment_size), (16 << 20, 17 << 20));
    let again = NodeConfig::from_toml(&shown.to_toml()).unwrap();
    assert_eq!(again.effective().to_toml(), shown.to_toml());
    assert!(shown.name.contains('-') && shown.name == again.name, "{}", shown.name);
    assert!(!shown.to_toml().contains("0B"), "{}", shown.to_toml());
}

#[test]
fn a_list_of_nodes_has_this_node_s_name_for_its_address_and_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let (file, list) = (folder.path().join("node.toml"), folder.path().join("nodes.toml"));
    let directory = format!("[directory]\nfile = {list:?}\n");
    let read = |nodes: &str, more: &str| {
        std::fs::write(&list, nodes).unwrap();
        std::fs::write(&file, format!("name = 'left'\n{LEAST}{PEERS}{more}{directory}")).unwrap();
        NodeConfig::read(&file).map(drop).map_err(|error| error.to_string())
    };
    let node = |name: &str, address: &str| format!("[[nodes]]\nname = '{name}'\naddress = '{address}'\n");
    assert_eq!(read(&node("left", "127.0.0.1:7600"), ""), Ok(()));
    assert_eq!(read(&node("right", "127.0.0.1:7601"), ""), Ok(()), "it need not be there");
    let other = read(&node("left", "10.0.0.9:7600"), "").unwrap_err();
    assert!(other.contains("for a node at 10.0.0.9:7600, while this one is at 127.0.0.1:7600"), "{other}");
    assert_eq!(read(&node("left", "10.0.0.9:7600"), "advertise = '10.0.0.9:7600'\n"), Ok(()));
    let unnamed = read(&node("right", "127.0.0.1:7600"), "").unwrap_err();
    assert!(unnamed.contains("allowed is the name that the list has for this node"), "{unnamed}");
    let broken = read("[[nodes]]\nname = 'a'\naddress = 'localhost:7600'\n", "").unwrap_err();
    assert!(broken.contains("directory.file: ") && broken.contains("nodes.toml"), "{broken}");
    std::fs::remove_file(&list).unwrap();
    std::fs::write(&file, format!("{LEAST}{PEERS}{directory}")).unwrap();
    assert!(NodeConfig::read(&file).unwrap_err().to_string().contains("directory.file: "));
}

#[test]
fn what_is_not_allowed_is_refused_with_what_is() {
    for (text, says) in [
        (format!("nope = 1\n{LEAST}"), "unknown field `nope`, expected one of `name`, `socket`"),
        (format!("{LEAST}[limits]\nclients = 0\n"), "limits.clients is 0; allowed is 1 to 4096"),
        (format!("{LEAST}pages = 'big'\n"), "expected one of `base`, `transparent`, `huge`"),
        (format!("{LEAST}[[ssd]]\npath = 'x'\nsize = '1MiB'\n"), "ssd.size is 1MiB; allowed is 80MiB to"),
        (
            format!("{LEAST}[[ssd]]\npath = 'x'\nsize = '100GiB'\nsegment_size = '2GiB'\n"),
            "ssd.segment_size is 2GiB; allowed is 64KiB to 1GiB",
        ),
        (
            format!("{LEAST}[[ssd]]\npath = 'x'\nsize = '100GiB'\nsegment_size = '65535KiB'\n"),
            "ssd.segment_size is 65535KiB; allowed is a multiple of 4KiB",
        ),
        (
            format!("{LEAST}[[ssd]]\npath = 'x'\nsize = '20TiB'\nsegment_size = '16MiB'\n"),
            "ssd.size is 20TiB; allowed is 80MiB to 16TiB",
        ),
        (
            "socket = 'x'\n[memory]\nsize = '64GiB'\nlargest_chunk = '512MiB'\n".into(),
            "memory.largest_chunk is 512MiB; allowed is 1028KiB to 256MiB",
        ),
        (
            "socket = 'x'\n[memory]\nsize = '64GiB'\nchunk_size = '300MiB'\n".into(),
            "memory.chunk_size is 300MiB; allowed is 1B to 256MiB",
        ),
        (
            "socket = 'x'\n[memory]\nsize = '64GiB'\nlargest_chunk = '1MiB'\n".into(),
            "memory.largest_chunk is 1MiB; allowed is 1028KiB to 256MiB",
        ),
        ("socket = 'x'\n[memory]\nsize = '20TiB'\n".into(), "memory.size is 20TiB; allowed is 256KiB to"),
        ("[memory]\nsize = '1GiB'\n".into(), "missing field `socket`"),
        (
            format!("{LEAST}{PEERS}[[peers.rails]]\nfabric = 'tin'\n"),
            "the fabric of peers.rails is \"tin\"; allowed is \"memory\", \"rdma\" and \"tcp\"",
        ),
        (
            format!("{LEAST}{PEERS}[[peers.rails]]\nfabric = 'tcp'\ndevices = ['a,b']\n"),
            "a device of peers.rails is \"a,b\"; allowed is letters",
        ),
        (
            format!("{LEAST}{PEERS}{}", "[[peers.rails]]\nfabric = 'tcp'\n".repeat(17)),
            "the number of peers.rails is 17; allowed is 0 to 16",
        ),
        (
            format!("{LEAST}{METRICS}[metrics.push]\nendpoint = 'collector'\n"),
            "metrics.push.endpoint is \"collector\"; allowed is http://host:port",
        ),
        (
            format!("{LEAST}{METRICS}[metrics.push]\nendpoint = 'http://a:1'\nevery_s = 0\n"),
            "metrics.push.every_s is 0; allowed is 1 to 3600",
        ),
        (
            format!("{LEAST}[tenants]\nmemory = '2GiB'\n"),
            "a tenant's quota of memory is 2GiB; allowed is 4KiB to 1GiB",
        ),
        (format!("{LEAST}[tenants]\nkey_file = 'keys'\n"), "is 0; allowed is one or more"),
        (
            format!("{LEAST}{}", "[[tenants.quotas]]\ntenant = 7\n".repeat(2)),
            "the tenant of two tenants.quotas is 7; allowed is each tenant once",
        ),
        ("socket = 'x'\n[memory]\nsize = '1GB'\n".into(), "memory.size: "),
        (
            "socket = 'x'\n[memory]\nsize = '1GB'\n".into(),
            "'1GB' is no size in whole bytes; allowed is a number",
        ),
        ("socket = 'x'\n[memory]\nsize = 1.5\n".into(), "memory.size: "),
        ("socket = 'x'\n[memory]\nsize = 1.5\n".into(), "expected a size: a number with K, M, G or T"),
        (format!("{LEAST}[limits]\nclients = '64'\n"), "limits.clients: "),
        (format!("name = ''\n{LEAST}"), "name is \"\"; allowed is 1 to 255 bytes"),
        ("socket = \"/a\\u0000b\"\n[memory]\nsize = '1GiB'\n".into(), "allowed is a path of 1 to 107 bytes"),
        (
            format!("{LEAST}[directory]\netcd = ['http://127.0.0.1:2379']\n"),
            "[directory] without [peers] is given; allowed is peers.listen beside it",
        ),
        (
            format!(
                "{LEAST}[peers]\nlisten = '127.0.0.1:0'\n[directory]\netcd = ['http://127.0.0.1:2379']\n"
            ),
            "peers.listen is 127.0.0.1:0; allowed is a port other than 0 where etcd tells it to others",
        ),
        (
            format!("{LEAST}{PEERS}[directory]\netcd = ['http://127.0.0.1:2379']\nttl_s = 1\n"),
            "directory.ttl_s is 1; allowed is 2 to 3600",
        ),
        (
            format!("{LEAST}{PEERS}[directory]\netcd = ['127.0.0.1:2379']\n"),
            "directory.etcd is \"127.0.0.1:2379\"; allowed is http://host:port",
        ),
        (format!("{LEAST}{PEERS}[directory]\netcd = ['https://127.0.0.1:2379']\n"), "(https is not spoken)"),
        (
            format!("{LEAST}{PEERS}[directory]\netcd = ['http://u:secret@127.0.0.1:2379']\n"),
            "directory.etcd is \"http://(user)@127.0.0.1:2379\"; allowed is http://host:port, without a user",
        ),
        (
            format!("{LEAST}{PEERS}[directory]\netcd = ['http://a:1']\nprefix = '{}'\n", "x".repeat(257)),
            "directory.prefix is a text of 257 bytes; allowed is at most 256",
        ),
        (
            format!("{LEAST}{PEERS}advertise = '0.0.0.0:7600'\n"),
            "peers.advertise is 0.0.0.0:7600; allowed is an address and a port to which peers can connect",
        ),
        (format!("{LEAST}{PEERS}advertise = '10.0.0.1:0'\n"), "peers.advertise is 10.0.0.1:0"),
        (
            format!("{LEAST}{}", "[[ssd]]\npath = 'x'\nsize = '160MiB'\n".repeat(2)),
            "the path of two logs is \"x\"; allowed is each log once",
        ),
        (
            format!("{LEAST}[[ssd]]\npath = 'x'\nsize = 167772161\n"),
            "ssd.size is 167772161B; allowed is a multiple of 4KiB",
        ),
        (
            "socket = 'x'\n[memory]\nsize = '1GiB'\n[relays]\nsocket = './x'\n".into(),
            "relays.socket is \"./x\"; allowed is another path than socket's",
        ),
        (
            format!("{LEAST}[peers]\nlisten = '10.0.0.1'\n"),
            "'10.0.0.1' is no address; allowed is an IP address and a port, as 10.0.0.1:7600",
        ),
        (
            format!("{LEAST}{PEERS}advertise = 'left:7600'\n"),
            "'left:7600' is no address; allowed is an IP address and a port",
        ),
        (
            format!("{LEAST}[metrics]\nlisten = ':9310'\n"),
            "':9310' is no address; allowed is an IP address and a port",
        ),
        (
            format!("socket = '/{}'\n[memory]\nsize = '1GiB'\n", "x".repeat(107)),
            "x\"; allowed is a path of 1 to 107 bytes",
        ),
        (
            format!("{LEAST}[relays]\nsocket = ''\n"),
            "relays.socket is \"\"; allowed is a path of 1 to 107 bytes",
        ),
        (
            format!("{LEAST}[peers]\nlisten = '10.0.0.1:7600'\n"),
            "peers.listen is 10.0.0.1:7600; allowed is a loopback address, or any with TLS",
        ),
        (
            format!("{LEAST}[peers]\nlisten = '[::]:7600'\nplain_beyond_loopback = true\n"),
            "peers.listen is [::]:7600; allowed is an address that peers can connect to, or any with",
        ),
    ] {
        let error = NodeConfig::from_toml(&text).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}
