use super::*;
use crate::testing::{PLENTY, SLACK, all, configs, free_port, meeting_fault};
use crate::wire::{Greeting, PROOF};
use std::fs;
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const SHORT: Duration = Duration::from_millis(500);
const SECRET: &[u8] = b"a secret of this test alone";

/// Returns ranks that meet at a free port, as separate processes do.
fn apart(ranks: usize, deadline: Duration) -> Vec<GroupConfig> {
    let address = format!("127.0.0.1:{}", free_port());
    let config = |rank| GroupConfig::new(rank, ranks, &address).secret(SECRET).deadline(deadline);
    (0..ranks).map(config).collect()
}

fn in_time(took: Duration, deadline: Duration) {
    assert!(took < deadline + Duration::from_secs(1) + SLACK, "took {took:?} with a deadline of {deadline:?}");
}

/// Returns the faults of a rendezvous that fails on all ranks.
fn all_hear(configs: Vec<GroupConfig>, deadline: Duration) -> Vec<RendezvousFault> {
    let ends = all(configs, |config| meeting_fault(meet(&config)));
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
        .expect("a list of open files")
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
        for ((rank, connections), _) in &met {
            assert_eq!(connections.len(), ranks);
            for (other, connection) in connections.iter().enumerate() {
                assert_eq!(connection.is_none(), other == *rank);
            }
        }
        // Each connection leads to the right rank.
        for ((rank, connections), _) in &met {
            for (other, connection) in connections.iter().enumerate() {
                if let Some(connection) = connection {
                    let mut connection = connection;
                    connection.write_all(&[*rank as u8, other as u8]).expect("it is open");
                }
            }
        }
        for ((rank, connections), _) in &met {
            for (other, connection) in connections.iter().enumerate() {
                if let Some(connection) = connection {
                    let (mut connection, mut said) = (connection, [0; 2]);
                    connection.read_exact(&mut said).expect("it is open");
                    assert_eq!(said, [other as u8, *rank as u8]);
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
    assert_eq!(listening_sockets().len(), 1, "the test sees what listens");
    drop(listener);
    let met = all(configs, |config| meet(&config).expect("the ranks meet"));
    assert_eq!(listening_sockets(), Vec::<String>::new());
    assert!(TcpStream::connect(&address).is_err());
    drop(met);
    meet(&GroupConfig::new(0, 1, "")).expect("one rank needs nobody");
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
                Some(config) => Some(meeting_fault(meet(config))),
                None => {
                    let address = config.address.parse().expect("an address");
                    let meeting = Rendezvous {
                        config: &config,
                        start: Instant::now(),
                        until: after(PLENTY),
                        addresses: vec![address],
                        is_this_host: true,
                    };
                    let Ok(link) = meeting.call(0, &[address], None) else { panic!("rank 0 answers") };
                    meeting.say_hello(&link, [0; 16], 0).expect("it is heard");
                    // Reads everything to the end.
                    while link.receive(Stage::Rendezvous, after(PLENTY)).is_ok() {}
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
            let meeting = Rendezvous {
                config,
                start: Instant::now(),
                until: after(PLENTY),
                addresses: vec![address],
                is_this_host: true,
            };
            let Ok(link) = meeting.call(0, &[address], None) else { panic!("rank 0 answers") };
            meeting.say_hello(&link, [0; 16], 9).expect("it is heard");
            assert!(
                matches!(link.receive(Stage::Rendezvous, after(PLENTY)), Ok(Message::Missing(missing)) if missing == [2])
            );
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
                return meeting_fault(meet(config));
            }
            let meeting = Rendezvous {
                config: &other,
                start: Instant::now(),
                until: after(PLENTY),
                addresses: vec![address],
                is_this_host: true,
            };
            let Ok(link) = meeting.call(0, &[address], None) else { panic!("rank 0 answers") };
            let hello = Hello { protocol, version: named.into(), group: [0; 16], port: 0 };
            link.send(&Message::Hello(hello), after(PLENTY)).expect("it is heard");
            loop {
                match link.receive(Stage::Rendezvous, after(PLENTY)).expect("it is broadcast_error") {
                    Message::Refused(fault) => return *fault,
                    said => assert!(matches!(said, Message::Missing(_))),
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
fn wrong_secret_is_named_by_both() {
    for (other, none) in [(1, false), (0, false), (1, true), (0, true)] {
        let mut configs = apart(2, SHORT);
        configs[other] = configs[other].clone().secret("another secret than that");
        if none {
            let (rank, address) = (configs[other].rank, configs[other].address.clone());
            configs[other] = GroupConfig::new(rank, 2, address).deadline(SHORT);
        }
        let faults = all_hear(configs, SHORT);
        assert_eq!(faults[1].kind, RendezvousFaultKind::Secret { rank: 0 }, "{}", faults[1]);
        let RendezvousFaultKind::Missing { ranks, seen } = &faults[0].kind else { panic!("{}", faults[0]) };
        assert!(
            *ranks == [1] && seen.iter().any(|seen| seen.contains("rank 1 has a different secret")),
            "{}",
            faults[0]
        );
    }
    // A stranger that claims to be rank 1 does not keep rank 1 out. If it comes after all have met,
    // nothing answers.
    let configs = apart(2, PLENTY);
    let stranger = configs[1].clone().secret("another secret than that").deadline(SHORT);
    all([&configs[0], &stranger, &configs[1]], |config| {
        let met = meet(config);
        assert_eq!(met.is_err(), std::ptr::eq(config, &stranger));
    });
}

#[test]
fn first_timeout_explains_missing_rank() {
    let patience = Duration::from_secs(2);
    let mut configs = apart(3, PLENTY);
    configs[1] = configs[1].clone().secret("another secret than that");
    configs[2] = configs[2].clone().deadline(patience);
    let faults = all_hear(configs, patience);
    assert_eq!((faults[0].found_by, faults[2].found_by), (2, 2));
    let RendezvousFaultKind::Missing { ranks, seen } = &faults[0].kind else { panic!("{}", faults[0]) };
    assert!(*ranks == [1] && seen.iter().any(|seen| seen.contains("rank 1 has a different secret")), "{}", faults[0]);
}

#[test]
fn rank_0_must_prove_itself() {
    // A server that behaves like a real one, but has only the data that the client has sent.
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let config =
        GroupConfig::new(1, 2, listener.local_addr().expect("an address").to_string()).secret(SECRET).deadline(PLENTY);
    let ends = all([true, false], |client| {
        if client {
            return Some(meeting_fault(meet(&config)));
        }
        let link = Link::new(listener.accept().expect("it calls").0).expect("a link");
        let Ok(Message::Greeting(greeting)) = link.receive(Stage::Introduction, after(PLENTY)) else {
            panic!("a greeting")
        };
        link.send(&Message::Greeting(Greeting { rank: 0, ..greeting }), after(PLENTY)).expect("it hears");
        let proof = link.receive(Stage::Introduction, after(PLENTY)).expect("a proof");
        // The client's own proof, sent back.
        link.send(&proof, after(PLENTY)).expect("it hears");
        let _ = link.receive(Stage::Rendezvous, after(PLENTY));
        None
    });
    assert_eq!(ends[0].0.as_ref().expect("a fault").kind, RendezvousFaultKind::Secret { rank: 0 });
}

#[test]
fn replayed_proof_is_refused() {
    let secret = crate::secret::Secret::new(SECRET);
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let address = listener.local_addr().expect("an address");
    let mut listener = Listener::new(listener, (0, 2), &secret).expect("a listener");
    // This test plays the listener, and keeps what a rank sends to a server.
    let client = Greeting::new([5; PROOF], 1, 2);
    let server = Greeting::new([6; PROOF], 0, 2);
    let overheard = secret.proof(Role::Client, &client, &server);
    let link = Link::new(TcpStream::connect(address).expect("it listens")).expect("a link");
    link.send(&Message::Greeting(client), after(PLENTY)).expect("it hears");
    let start = Instant::now();
    let answer = thread::scope(|scope| {
        let caller = scope.spawn(|| {
            let Ok(Message::Greeting(own)) = link.receive(Stage::Introduction, after(PLENTY)) else {
                panic!("a greeting")
            };
            assert_ne!(own.nonce, server.nonce, "a number is made up anew");
            link.send(&Message::Proof(overheard), after(PLENTY)).expect("it hears");
            link.receive(Stage::Introduction, after(PLENTY))
        });
        while listener.seen().is_empty() {
            assert!(listener.next_peer().is_none() && start.elapsed() < PLENTY);
        }
        caller.join().expect("no panic")
    });
    assert_eq!(answer, Ok(Message::Denied));
    assert!(listener.seen()[0].contains("rank 1 has a different secret"), "{:?}", listener.seen());
}

#[test]
fn taken_port_is_named() {
    let taken = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let fault = meeting_fault(meet(&GroupConfig::new(0, 2, &address).deadline(PLENTY)));
    assert!(matches!(fault.kind, RendezvousFaultKind::Taken { .. }), "{fault}");
    assert!(fault.to_string().contains(&address) && fault.to_string().contains("another port"), "{fault}");
}

#[test]
fn foreign_listener_is_reported() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let config = GroupConfig::new(1, 2, listener.local_addr().expect("an address").to_string()).deadline(SHORT);
    thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
            thread::sleep(Duration::from_millis(20));
        }
    });
    let fault = meeting_fault(meet(&config));
    assert!(fault.to_string().contains("not from stepscope"), "{fault}");
}

#[test]
fn strangers_delay_no_rank() {
    let configs = apart(4, PLENTY);
    let (address, over) = (configs[0].address.clone(), Arc::new(AtomicBool::new(false)));
    let strangers: Vec<_> = (0..8)
        .map(|kind: usize| {
            let (address, over) = (address.clone(), over.clone());
            thread::spawn(move || {
                let mut held = Vec::new();
                while !over.load(Ordering::SeqCst) {
                    if let Ok(mut stream) = TcpStream::connect(&address) {
                        let greeting = Message::Greeting(Greeting::new([1; PROOF], 1, 4)).frame();
                        let _ = match kind {
                            0 => stream.write_all(b"GET / HTTP/1.1\r\n\r\n"),
                            1 => stream.write_all(&[0, 255, 255, 255, 255]),
                            2 => stream.write_all(&[0xff; 10_000]),
                            3 => stream.write_all(&greeting[..greeting.len() - 1]),
                            4 => stream.write_all(&[greeting, Message::Proof([0; PROOF]).frame()].concat()),
                            5 => stream.write_all(&greeting),
                            _ => Ok(()),
                        };
                        // Some leave at once. Others send nothing, and stay.
                        if kind != 7 && held.len() < 40 {
                            held.push(stream);
                        }
                    }
                    thread::sleep(Duration::from_millis(1));
                }
            })
        })
        .collect();
    let met = all(configs, |config| {
        // The strangers come first.
        thread::sleep(Duration::from_millis(if config.rank == 0 { 0 } else { 300 }));
        meet(&config).expect("the ranks meet")
    });
    over.store(true, Ordering::SeqCst);
    for (_, took) in met {
        assert!(took < INTRODUCTION + SLACK, "took {took:?}");
    }
    strangers.into_iter().for_each(|stranger| stranger.join().expect("no panic"));
}

#[test]
fn crowding_evicts_oldest_strangers_only() {
    let secret = crate::secret::Secret::default();
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let address = listener.local_addr().expect("an address");
    let mut listener = Listener::new(listener, (0, 2), &secret).expect("a listener");
    let config = GroupConfig::new(1, 2, address.to_string());
    let meeting = Rendezvous {
        config: &config,
        start: Instant::now(),
        until: after(PLENTY),
        addresses: vec![address],
        is_this_host: true,
    };
    thread::scope(|scope| {
        let caller = scope.spawn(|| {
            let Ok(link) = meeting.call(0, &[address], None) else { panic!("it answers") };
            meeting.say_hello(&link, [0; 16], 0).expect("it is heard");
            link
        });
        let peer = loop {
            if let Some(peer) = listener.next_peer() {
                break peer;
            }
        };
        let start = Instant::now();
        let mut strangers: Vec<_> = (0..150)
            .map(|_| {
                assert!(listener.next_peer().is_none());
                TcpStream::connect(address).expect("it listens")
            })
            .collect();
        let last = Instant::now();
        while last.elapsed() < Duration::from_millis(100) {
            assert!(listener.next_peer().is_none());
        }
        strangers[0].set_read_timeout(Some(PLENTY)).expect("a socket");
        assert!(!matches!(strangers[0].read(&mut [0]), Ok(1..)), "the oldest was shown out");
        assert!(start.elapsed() < INTRODUCTION - Duration::from_secs(1), "and not by its own deadline");
        let link = caller.join().expect("no panic");
        peer.link.send(&Message::Go, after(PLENTY)).expect("the peer is still there");
        assert_eq!(link.receive(Stage::Rendezvous, after(PLENTY)), Ok(Message::Go));
    });
}

#[test]
fn other_hosts_require_a_secret() {
    for address in ["192.0.2.1:29500", "0.0.0.0:29500", "[2001:db8::1]:29500"] {
        for rank in [0, 1] {
            let start = Instant::now();
            let error = meet(&GroupConfig::new(rank, 2, address).deadline(PLENTY)).expect_err("it is refused");
            assert!(start.elapsed() < PLENTY, "at once");
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
    for address in ["", "host", ":1", "host:", "host:0", "host:65536", "host:-1", "no such host.invalid:1"] {
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
    let fault = meeting_fault(meet(&configs.remove(1)));
    assert!(matches!(fault.kind, RendezvousFaultKind::Unreachable { .. }), "{fault}");
    all(apart(2, Duration::MAX), |config| drop(meet(&config).expect("the ranks meet")));
}
