//! Ends of a connection that do not authenticate, or belong to another version.

use super::tests::{SECRET, SHORT, all_hear, apart};
use super::*;
use crate::channel::{CALL, Handshake};
use crate::secret::Secret;
use crate::testing::{PLENTY, SLACK, all, rendezvous_fault};
use crate::wire::{self, Greeting, Stage};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn wrong_secret_is_named_by_both() {
    for (other, none) in [(1, false), (0, false), (1, true), (0, true)] {
        let mut configs = apart(2, SHORT);
        configs[other] = configs[other].clone().secret("a different group secret");
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
    let foreign = configs[1].clone().secret("a different group secret").deadline(SHORT);
    all([&configs[0], &foreign, &configs[1]], |config| {
        let met = meet(config);
        assert_eq!(met.is_err(), std::ptr::eq(config, &foreign));
    });
}

#[test]
fn rank_0_must_prove_itself() {
    // Servers that have only the data that clients have sent, and the answers to other clients.
    let secret = Secret::new(SECRET);
    let overheard = {
        let prologue = Message::Greeting(Greeting::new(1, 2)).frame();
        let (_, call) = Handshake::call(&secret, &prologue).expect("random numbers");
        Handshake::answer(&secret, &prologue, &call, 0).expect("the secret is the same").0
    };
    for sends_back in [true, false] {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        let config = GroupConfig::new(1, 2, address).secret(SECRET).deadline(PLENTY);
        let ends = all([true, false], |client| {
            if client {
                return Some(rendezvous_fault(meet(&config)));
            }
            let connection = Connection::new(listener.accept().expect("the caller connects").0).expect("a connection");
            let Ok(Message::Greeting(_)) = connection.receive(after(PLENTY)) else { panic!("a greeting") };
            let Ok(Message::Handshake(call)) = connection.receive(after(PLENTY)) else { panic!("a handshake") };
            let answer = if sends_back { call } else { overheard.clone() };
            connection.send(&Message::Handshake(answer), after(PLENTY)).expect("the peer receives the message");
            let _ = connection.receive(after(PLENTY));
            None
        });
        assert_eq!(ends[0].0.as_ref().expect("a fault").kind, RendezvousFaultKind::Secret { rank: 0 });
    }
}

/// Runs a listener of rank 0 of 2 until it has refused a caller. Returns the bytes that the caller
/// received, and the listener's description of it.
fn refused_caller(secret: &Secret, sends: impl FnOnce(&mut TcpStream) + Send) -> (Vec<u8>, String) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let address = listener.local_addr().expect("an address");
    let mut listener = Listener::new(listener, 0, secret).expect("a listener");
    let start = Instant::now();
    let received = thread::scope(|scope| {
        let caller = scope.spawn(|| {
            let mut stream = TcpStream::connect(address).expect("the listener accepts");
            sends(&mut stream);
            let mut received = Vec::new();
            // A connection that is closed with unread data is reset.
            let _ = stream.read_to_end(&mut received);
            received
        });
        while listener.seen().is_empty() {
            assert!(listener.next_peer().is_none() && start.elapsed() < PLENTY);
        }
        caller.join().expect("no panic")
    });
    (received, listener.seen().join("; "))
}

#[test]
fn repeated_handshakes_are_refused() {
    let secret = Secret::new(SECRET);
    let greeting = Message::Greeting(Greeting::new(1, 2)).frame();
    // A whole conversation of rank 1 with another server.
    let (handshake, call) = Handshake::call(&secret, &greeting).expect("random numbers");
    let (answer, _) = Handshake::answer(&secret, &greeting, &call, 0).expect("the secret is the same");
    let (_, mut keys) = handshake.read_answer(&answer).expect("the secret is the same");
    let hello = Hello { protocol: PROTOCOL, version: version().into(), group: [0; 16], port: 0 };
    let hello = keys.sealer.seal(&Message::Hello(hello).frame());
    let (received, seen) = refused_caller(&secret, |stream| {
        let conversation = [greeting, Message::Handshake(call).frame(), hello].concat();
        stream.write_all(&conversation).expect("the listener accepts");
    });
    // The answer to the handshake is another one, and the repeated message does not fit its keys.
    let Ok(Message::Handshake(other)) = wire::read(&mut &received[..], Stage::Introduction) else {
        panic!("{received:?}")
    };
    assert_ne!(other, answer);
    assert!(seen.contains("was not a rank: the data received was altered, repeated"), "{seen}");
}

#[test]
fn handshakes_of_other_secrets_are_denied() {
    let greeting = Message::Greeting(Greeting::new(1, 2)).frame();
    let (_, call) = Handshake::call(&Secret::new(b"a different group secret"), &greeting).expect("random numbers");
    let (received, seen) = refused_caller(&Secret::new(SECRET), |stream| {
        stream.write_all(&[greeting, Message::Handshake(call).frame()].concat()).expect("the listener accepts");
        stream.shutdown(Shutdown::Write).expect("the connection is open");
    });
    assert_eq!(wire::read(&mut &received[..], Stage::Introduction), Ok(Message::Denied));
    assert!(seen.contains("rank 1 has a different secret"), "{seen}");
}

#[test]
fn unencrypted_messages_are_refused() {
    let secret = Secret::new(SECRET);
    let greeting = Message::Greeting(Greeting::new(1, 2)).frame();
    let (_, call) = Handshake::call(&secret, &greeting).expect("random numbers");
    let hello = Hello { protocol: PROTOCOL, version: version().into(), group: [0; 16], port: 0 };
    let (_, seen) = refused_caller(&secret, |stream| {
        let messages = [greeting, Message::Handshake(call).frame(), Message::Hello(hello).frame()].concat();
        stream.write_all(&messages).expect("the listener accepts");
        stream.shutdown(Shutdown::Write).expect("the connection is open");
    });
    assert!(seen.contains("was not a rank"), "{seen}");
}

#[test]
fn old_protocols_are_named() {
    // The greeting of rank 1 of 2 in versions 1 to 3.
    let body = [&b"stepscope group\n"[..], &[9; 32], &[1, 2]].concat();
    let frame = [&[0][..], &(body.len() as u32).to_le_bytes(), &body].concat();
    let (received, seen) =
        refused_caller(&Secret::new(SECRET), |stream| stream.write_all(&frame).expect("the listener accepts"));
    assert!(received.is_empty(), "{received:?}");
    assert!(seen.contains("messages of version 3 or less, here 4"), "{seen}");
    // A rank 0 of an old version reads the greeting, and closes the connection.
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let _ = stream.read(&mut [0; 10]);
        }
    });
    let fault = rendezvous_fault(meet(&GroupConfig::new(1, 2, address).secret(SECRET).deadline(SHORT)));
    assert!(matches!(fault.kind, RendezvousFaultKind::Unreachable { rank: 0, .. }), "{fault}");
    assert!(fault.to_string().contains("another version of stepscope may run there"), "{fault}");
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
    let fault = rendezvous_fault(meet(&config));
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
                        let greeting = Message::Greeting(Greeting::new(1, 4)).frame();
                        let _ = match kind {
                            0 => stream.write_all(b"GET / HTTP/1.1\r\n\r\n"),
                            1 => stream.write_all(&[0, 255, 255, 255, 255]),
                            2 => stream.write_all(&[0xff; 10_000]),
                            3 => stream.write_all(&greeting[..greeting.len() - 1]),
                            4 => stream.write_all(&[greeting, Message::Handshake(vec![0; CALL]).frame()].concat()),
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
        assert!(took < HANDSHAKE_TIMEOUT + SLACK, "took {took:?}");
    }
    strangers.into_iter().for_each(|foreign| foreign.join().expect("no panic"));
}

#[test]
fn crowding_evicts_oldest_strangers_only() {
    let secret = Secret::default();
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let address = listener.local_addr().expect("an address");
    let mut listener = Listener::new(listener, 0, &secret).expect("a listener");
    let config = GroupConfig::new(1, 2, address.to_string());
    let rendezvous = Rendezvous {
        config: &config,
        start: Instant::now(),
        until: after(PLENTY),
        addresses: vec![address],
        is_this_host: true,
    };
    thread::scope(|scope| {
        let caller = scope.spawn(|| {
            let Ok(mut link) = rendezvous.call(0, &[address], None) else { panic!("the listener must answer") };
            rendezvous.send_hello(&mut link, [0; 16], 0).expect("the peer receives the message");
            link
        });
        let mut peer = loop {
            if let Some(peer) = listener.next_peer() {
                break peer;
            }
        };
        let start = Instant::now();
        let mut strangers: Vec<_> = (0..150)
            .map(|_| {
                assert!(listener.next_peer().is_none());
                TcpStream::connect(address).expect("the listener accepts")
            })
            .collect();
        let last = Instant::now();
        while last.elapsed() < Duration::from_millis(100) {
            assert!(listener.next_peer().is_none());
        }
        strangers[0].set_read_timeout(Some(PLENTY)).expect("a socket");
        assert!(!matches!(strangers[0].read(&mut [0]), Ok(1..)), "the oldest caller's connection must be closed");
        assert!(
            start.elapsed() < HANDSHAKE_TIMEOUT - Duration::from_secs(1),
            "the connection must close before its own deadline"
        );
        let mut link = caller.join().expect("no panic");
        peer.link.send(&Message::Go, after(PLENTY)).expect("the peer is still there");
        assert_eq!(link.receive(after(PLENTY)), Ok(Message::Go));
    });
}
