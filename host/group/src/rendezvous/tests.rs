use super::*;
use crate::testing::{PLENTY, SLACK, all, configs, free_port, rendezvous_fault};
use std::fs;
use std::io::{Read, Write};

pub(super) const SHORT: Duration = Duration::from_millis(500);
pub(super) const SECRET: &[u8] = b"a secret of this test alone";

/// Returns ranks that meet at a free port, as separate processes do.
pub(super) fn apart(ranks: usize, deadline: Duration) -> Vec<GroupConfig> {
    let address = format!("127.0.0.1:{}", free_port());
    let config = |rank| GroupConfig::new(rank, ranks, &address).secret(SECRET).deadline(deadline);
    (0..ranks).map(config).collect()
}

pub(super) fn in_time(took: Duration, deadline: Duration) {
    assert!(took < deadline + Duration::from_secs(1) + SLACK, "took {took:?} with a deadline of {deadline:?}");
}

/// Returns the faults of a rendezvous that fails on all ranks.
pub(super) fn all_hear(configs: Vec<GroupConfig>, deadline: Duration) -> Vec<RendezvousFault> {
    let ends = all(configs, |config| rendezvous_fault(meet(&config)));
    ends.into_iter()
        .map(|(fault, took)| {
            in_time(took, deadline);
            fault
        })
        .collect()
}

/// Returns the listening sockets of this process, from the system's own table.
fn listening_sockets() -> Vec<String> {
    let own: Vec<String> = fs::read_dir("/proc/self/fd")
        .expect("/proc lists the open files")
        .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok()?.to_str().map(str::to_string))
        .collect();
    let tables = ["/proc/self/net/tcp", "/proc/self/net/tcp6"];
    let lines: String = tables.iter().filter_map(|table| fs::read_to_string(table).ok()).collect();
    let listens = |line: &&str| {
        let columns: Vec<_> = line.split_whitespace().collect();
        // State 0A means listening, and the tenth column names the socket.
        columns.get(3) == Some(&"0A") && own.contains(&format!("socket:[{}]", columns[9]))
    };
    lines.lines().filter(listens).map(str::to_string).collect()
}

#[test]
fn ranks_meet_in_any_order() {
    for ranks in [1, 2, 4, 8] {
        let met = all(apart(ranks, PLENTY).into_iter().rev(), |config| {
            thread::sleep(Duration::from_millis(15 * (config.rank as u64 % 3)));
            (config.rank, meet(&config).expect("the ranks meet"))
        });
        for ((rank, channels), _) in &met {
            assert_eq!(channels.len(), ranks);
            for (other, channel) in channels.iter().enumerate() {
                assert_eq!(channel.is_none(), other == *rank);
            }
        }
        // Each channel leads to the right rank.
        let mut channels: Vec<_> = met.into_iter().map(|(met, _)| met).collect();
        for (rank, channels) in &mut channels {
            for (other, channel) in channels.iter_mut().enumerate() {
                if let Some(Channel { stream, keys }) = channel {
                    stream.write_all(&keys.sealer.seal(&[*rank as u8, other as u8])).expect("the connection is open");
                }
            }
        }
        for (rank, channels) in &mut channels {
            for (other, channel) in channels.iter_mut().enumerate() {
                if let Some(Channel { stream, keys }) = channel {
                    let mut got = [0; 2];
                    keys.opener.open(stream).read_exact(&mut got).expect("the connection is open");
                    assert_eq!(got, [other as u8, *rank as u8]);
                }
            }
        }
    }
}

#[test]
fn no_listener_remains_after_rendezvous() {
    let configs = apart(4, PLENTY);
    let address = configs[0].address.clone();
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    assert_eq!(listening_sockets().len(), 1, "the test must see one listening socket");
    drop(listener);
    let met = all(configs, |config| meet(&config).expect("the ranks meet"));
    assert_eq!(listening_sockets(), Vec::<String>::new());
    assert!(TcpStream::connect(&address).is_err());
    drop(met);
    meet(&GroupConfig::new(0, 1, "")).expect("a group of one rank needs no connection");
    assert_eq!(listening_sockets(), Vec::<String>::new());
    // Nothing listens after a failed rendezvous either.
    all_hear(apart(3, SHORT).into_iter().take(2).collect(), SHORT);
    assert_eq!(listening_sockets(), Vec::<String>::new());
}

#[test]
fn missing_ranks_are_named() {
    let mut configs = apart(4, SHORT);
    configs.retain(|config| [0, 2].contains(&config.rank));
    for fault in all_hear(configs, SHORT) {
        assert!(matches!(&fault.kind, RendezvousFaultKind::Missing { ranks, .. } if *ranks == [1, 3]), "{fault}");
        assert!(fault.to_string().contains("ranks 1, 3 have not arrived"), "{fault}");
    }
}

#[test]
fn missing_rank_0_names_its_address() {
    let configs = apart(3, SHORT);
    let address = configs[0].address.clone();
    for fault in all_hear(configs.into_iter().skip(1).collect(), SHORT) {
        let RendezvousFaultKind::Unreachable { rank: 0, address: at, reason } = &fault.kind else { panic!("{fault}") };
        assert_eq!(*at, address);
        assert!(reason.contains("refused"), "{fault}");
    }
}

#[test]
fn differing_group_size_reaches_all() {
    let mut configs = apart(3, PLENTY);
    configs[2].ranks = 4;
    for fault in all_hear(configs, Duration::ZERO) {
        assert_eq!(fault.kind, RendezvousFaultKind::Size { rank: 2, got: 4 }, "{fault}");
        assert!(fault.to_string().contains("rank 2 was configured with 4 ranks"), "{fault}");
    }
}

#[test]
fn duplicate_rank_reaches_all() {
    for number in [0, 1] {
        let mut configs = apart(3, PLENTY);
        configs[2].rank = number;
        if number == 0 {
            // A second rank 0 would also listen. The first can see only a second rank 0 that calls.
            let config = configs.remove(2);
            let ends = all([Some(&configs[0]), Some(&configs[1]), None], |one| match one {
                Some(config) => Some(rendezvous_fault(meet(config))),
                None => {
                    let address = config.address.parse().expect("an address");
                    let rendezvous = Rendezvous {
                        config: &config,
                        start: Instant::now(),
                        until: after(PLENTY),
                        addresses: vec![address],
                        is_this_host: true,
                    };
                    let Ok(mut link) = rendezvous.call(0, &[address], None) else { panic!("rank 0 answers") };
                    rendezvous.send_hello(&mut link, [0; 16], 0).expect("rank 0 receives the message");
                    // Reads everything to the end.
                    while link.receive(after(PLENTY)).is_ok() {}
                    None
                }
            });
            for (fault, _) in &ends[..2] {
                let fault = fault.as_ref().expect("a fault");
                assert!(matches!(fault.kind, RendezvousFaultKind::Twice { rank: 0, .. }), "{fault}");
            }
            continue;
        }
        for fault in all_hear(configs, Duration::ZERO) {
            let RendezvousFaultKind::Twice { rank, first, second } = &fault.kind else { panic!("{fault}") };
            assert!(*rank == 1 && first != second, "{fault}");
        }
    }
}

#[test]
fn restarted_rank_replaces_its_predecessor() {
    let configs = apart(3, PLENTY);
    let address: SocketAddr = configs[0].address.parse().expect("an address");
    let ends = all([0, 1, 2], |rank: usize| {
        if rank == 1 {
            // It calls, and dies.
            let config = &configs[1];
            let rendezvous = Rendezvous {
                config,
                start: Instant::now(),
                until: after(PLENTY),
                addresses: vec![address],
                is_this_host: true,
            };
            let Ok(mut link) = rendezvous.call(0, &[address], None) else { panic!("rank 0 answers") };
            rendezvous.send_hello(&mut link, [0; 16], 9).expect("rank 0 receives the message");
            assert!(matches!(link.receive(after(PLENTY)), Ok(Message::Missing(missing)) if missing == [2]));
        }
        if rank == 2 {
            thread::sleep(Duration::from_millis(600));
        }
        meet(&configs[rank]).expect("the ranks meet")
    });
    assert_eq!(ends.len(), 3);
}

#[test]
fn differing_version_reaches_all() {
    for (protocol, named) in [(PROTOCOL, "0.0.1"), (PROTOCOL + 1, version())] {
        let mut configs = apart(3, PLENTY);
        let other = configs.remove(2);
        let address: SocketAddr = other.address.parse().expect("an address");
        let ends = all([Some(&configs[0]), Some(&configs[1]), None], |one| {
            if let Some(config) = one {
                return rendezvous_fault(meet(config));
            }
            let rendezvous = Rendezvous {
                config: &other,
                start: Instant::now(),
                until: after(PLENTY),
                addresses: vec![address],
                is_this_host: true,
            };
            let Ok(mut link) = rendezvous.call(0, &[address], None) else { panic!("rank 0 answers") };
            let hello = Hello { protocol, version: named.into(), group: [0; 16], port: 0 };
            link.send(&Message::Hello(hello), after(PLENTY)).expect("rank 0 receives the message");
            loop {
                match link.receive(after(PLENTY)).expect("rank 0 answers") {
                    Message::Refused(fault) => return *fault,
                    message => assert!(matches!(message, Message::Missing(_))),
                }
            }
        });
        for (fault, took) in ends {
            in_time(took, Duration::ZERO);
            let RendezvousFaultKind::Version { rank: 2, expected, got } = &fault.kind else { panic!("{fault}") };
            assert!(expected.starts_with(version()) && got.starts_with(named) && expected != got, "{fault}");
        }
    }
}

#[test]
fn first_timeout_explains_missing_rank() {
    let patience = Duration::from_secs(2);
    let mut configs = apart(3, PLENTY);
    configs[1] = configs[1].clone().secret("a different group secret");
    configs[2] = configs[2].clone().deadline(patience);
    let faults = all_hear(configs, patience);
    assert_eq!((faults[0].found_by, faults[2].found_by), (2, 2));
    let RendezvousFaultKind::Missing { ranks, seen } = &faults[0].kind else { panic!("{}", faults[0]) };
    assert!(*ranks == [1] && seen.iter().any(|seen| seen.contains("rank 1 has a different secret")), "{}", faults[0]);
}

#[test]
fn taken_port_is_named() {
    let taken = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let fault = rendezvous_fault(meet(&GroupConfig::new(0, 2, &address).deadline(PLENTY)));
    assert!(matches!(fault.kind, RendezvousFaultKind::Taken { .. }), "{fault}");
    assert!(fault.to_string().contains(&address) && fault.to_string().contains("another port"), "{fault}");
}

#[test]
fn other_hosts_require_a_secret() {
    for address in ["192.0.2.1:29500", "0.0.0.0:29500", "[2001:db8::1]:29500"] {
        for rank in [0, 1] {
            let start = Instant::now();
            let error =
                meet(&GroupConfig::new(rank, 2, address).deadline(PLENTY)).expect_err("the address must be refused");
            assert!(start.elapsed() < PLENTY, "the refusal must not wait");
            assert!(matches!(error, Error::Misuse { .. }), "{error}");
            assert!(error.to_string().contains("STEPSCOPE_GROUP_SECRET"), "{error}");
        }
    }
    // The listening address is this host only, unless the group is on other hosts too.
    let ip = |text: &str| text.parse::<IpAddr>().expect("an address");
    assert_eq!(listening(ip("127.0.0.1"), true), ip("127.0.0.1"));
    assert_eq!(listening(ip("127.0.1.1"), false), ip("0.0.0.0"));
    assert_eq!(listening(ip("::1"), false), ip("::"));
    assert_eq!(listening(ip("10.0.0.5"), false), ip("10.0.0.5"));
}

#[test]
fn invalid_addresses_are_refused() {
    for address in ["", "host", ":1", "host:", "host:0", "host:65536", "host:-1"] {
        let error = meet(&GroupConfig::new(1, 2, address).secret(SECRET).deadline(PLENTY)).expect_err("no address");
        assert!(matches!(error, Error::Misuse { .. }), "{address}: {error}");
        assert!(error.to_string().contains("host:port"), "{error}");
    }
}

#[test]
fn local_host_names_work() {
    for host in ["localhost", "127.0.0.1"] {
        let port = free_port();
        let config = |rank| GroupConfig::new(rank, 3, format!("{host}:{port}")).deadline(PLENTY);
        all((0..3).map(config), |config| drop(meet(&config).expect("the ranks meet")));
    }
}

#[test]
fn zero_and_unlimited_deadlines_work() {
    let mut configs = configs(2, Duration::ZERO);
    let fault = rendezvous_fault(meet(&configs.remove(1)));
    assert!(matches!(fault.kind, RendezvousFaultKind::Unreachable { .. }), "{fault}");
    all(apart(2, Duration::MAX), |config| drop(meet(&config).expect("the ranks meet")));
}

/// Checks that a name without an address is a failed rendezvous, not a misuse, and that a malformed
/// address stays one.
#[test]
fn names_without_address_are_reported() {
    let config = |address: &str| GroupConfig::new(1, 2, address).secret(SECRET).deadline(SHORT);
    let start = Instant::now();
    let fault = rendezvous_fault(meet(&config("no-such-host.invalid:4000")));
    in_time(start.elapsed(), SHORT);
    assert!(matches!(fault.kind, RendezvousFaultKind::Unresolved { .. }), "{fault}");
    let text = fault.to_string();
    for part in ["no-such-host.invalid:4000", "the host of rank 1 finds no address", "DNS"] {
        assert!(text.contains(part), "{text}");
    }
    for malformed in ["no-such-host.invalid", "no-such-host.invalid:0", ":4000"] {
        assert!(matches!(meet(&config(malformed)), Err(Error::Misuse { op: "group", .. })), "{malformed}");
    }
}
