use super::*;
use proptest::collection::vec;
use proptest::prelude::*;
use std::time::Duration;
use stepscope_core::{LastHeard, RankFaultKind, RendezvousFaultKind};

fn text() -> impl Strategy<Value = String> {
    prop_oneof![".{0,40}", "[ -~]{1024}"].prop_map(|text| clip(&text).to_string())
}

fn time() -> impl Strategy<Value = Duration> {
    (any::<u32>(), 0..1_000_000_000u32).prop_map(|(seconds, nanos)| Duration::new(seconds.into(), nanos))
}

fn rank_fault() -> impl Strategy<Value = RankFault> {
    let kind = prop_oneof![
        Just(RankFaultKind::Late),
        Just(RankFaultKind::Left),
        Just(RankFaultKind::Stuck),
        text().prop_map(|reason| RankFaultKind::Unreadable { reason }),
        text().prop_map(|reason| RankFaultKind::Gone { reason }),
        text().prop_map(|reason| RankFaultKind::Failed { reason }),
        (text(), text()).prop_map(|(expected, got)| RankFaultKind::Differs { expected, got }),
    ];
    let last = (time(), text(), any::<u64>(), text(), time(), proptest::option::of(0..9usize)).prop_map(
        |(ago, op, sequence, location, since, waits_for)| LastHeard { ago, op, sequence, location, since, waits_for },
    );
    (kind, 0..5usize, 0..5usize, text(), any::<u64>(), text(), time(), proptest::option::of(last)).prop_map(
        |(kind, rank, found_by, op, sequence, location, waited, last)| RankFault {
            rank,
            ranks: 5,
            kind,
            found_by,
            op,
            sequence,
            location,
            waited,
            last,
        },
    )
}

fn rendezvous_fault() -> impl Strategy<Value = RendezvousFault> {
    let rank = 0..MOST_RANKS;
    let kind = prop_oneof![
        (vec(rank.clone(), 0..9), vec(text(), 0..3))
            .prop_map(|(ranks, seen)| RendezvousFaultKind::Missing { ranks, seen }),
        text().prop_map(|reason| RendezvousFaultKind::Taken { reason }),
        (rank.clone(), text(), text()).prop_map(|(rank, address, reason)| RendezvousFaultKind::Unreachable {
            rank,
            address,
            reason
        }),
        rank.clone().prop_map(|rank| RendezvousFaultKind::Secret { rank }),
        (rank.clone(), rank.clone()).prop_map(|(rank, got)| RendezvousFaultKind::Size { rank, got }),
        (rank.clone(), text(), text()).prop_map(|(rank, first, second)| RendezvousFaultKind::Twice {
            rank,
            first,
            second
        }),
        (rank.clone(), text(), text()).prop_map(|(rank, expected, got)| RendezvousFaultKind::Version {
            rank,
            expected,
            got
        }),
        (rank, text()).prop_map(|(rank, reason)| RendezvousFaultKind::Lost { rank, reason }),
        text().prop_map(|reason| RendezvousFaultKind::Unresolved { reason }),
    ];
    (kind, 0..9usize, text(), time()).prop_map(|(kind, found_by, address, waited)| RendezvousFault {
        found_by,
        ranks: 9,
        address,
        waited,
        kind,
    })
}

fn message() -> impl Strategy<Value = Message> {
    let greeting = (1..=MOST_RANKS as u32)
        .prop_flat_map(|ranks| (0..ranks).prop_map(move |rank| Message::Greeting(Greeting::new(rank, ranks))));
    let announcement = (any::<u64>(), text(), text(), any::<u64>(), text(), vec(any::<u8>(), 0..300)).prop_map(
        |(sequence, op, element, count, location, word)| {
            Message::Announce(Announcement { sequence, op, element, count, location, word })
        },
    );
    let beat = (any::<u64>(), text(), text(), any::<u64>(), proptest::option::of(any::<u32>())).prop_map(
        |(sequence, op, location, since_ms, waits_for)| {
            Message::Beat(Beat { sequence, op, location, since_ms, waits_for })
        },
    );
    // IPv6 addresses have fields that no text shows, so they are left out.
    let address = (any::<std::net::IpAddr>(), any::<u16>()).prop_map(|(ip, port)| SocketAddr::new(ip, port));
    prop_oneof![
        greeting,
        vec(any::<u8>(), 0..=MOST_HANDSHAKE).prop_map(Message::Handshake),
        (any::<u32>(), text(), any::<[u8; 16]>(), any::<u16>())
            .prop_map(|(protocol, version, group, port)| Message::Hello(Hello { protocol, version, group, port })),
        vec(any::<u32>(), 0..20).prop_map(Message::Missing),
        (any::<[u8; 16]>(), vec(address, 0..20)).prop_map(|(group, roster)| Message::Roster(group, roster)),
        rendezvous_fault().prop_map(|fault| Message::Refused(Box::new(fault))),
        announcement,
        beat,
        any::<u64>().prop_map(Message::Begin),
        vec(any::<u8>(), 0..300).prop_map(Message::Piece),
        rank_fault().prop_map(|fault| Message::Fault(Box::new(fault))),
        prop_oneof![Just(Message::Denied), Just(Message::Ready), Just(Message::Go), Just(Message::Bye)],
    ]
}

fn stage_of(message: &Message) -> Stage {
    KINDS[usize::from(message.frame()[0])].0
}

proptest! {
    #[test]
    fn messages_round_trip(message in message()) {
        let frame = message.frame();
        let stage = stage_of(&message);
        let mut bytes = &frame[..];
        prop_assert_eq!(read(&mut bytes, stage), Ok(message));
        prop_assert!(bytes.is_empty());
    }

    #[test]
    fn truncated_messages_are_refused(message in message()) {
        let (frame, stage) = (message.frame(), stage_of(&message));
        prop_assert_eq!(read(&mut &frame[..0], stage), Err(WireError::Ended));
        for end in 1..frame.len() {
            prop_assert_eq!(read(&mut &frame[..end], stage), Err(WireError::Cut), "{} of {} bytes", end, frame.len());
        }
        // A frame whose length has been corrected is not a message either.
        let body = frame.len() - HEADER;
        for end in 0..body {
            let mut frame = frame[..HEADER + end].to_vec();
            frame[1..HEADER].copy_from_slice(&(end as u32).to_le_bytes());
            let outcome = read(&mut &frame[..], stage);
            prop_assert!(
                matches!(message, Message::Piece(_)) || matches!(outcome, Err(WireError::Body { .. })),
                "{} of {} bytes: {:?}", end, body, outcome
            );
        }
    }

    #[test]
    fn nothing_may_follow_a_body(message in message()) {
        let (mut frame, stage) = (message.frame(), stage_of(&message));
        frame.push(b'x');
        let length = (frame.len() - HEADER) as u32;
        frame[1..HEADER].copy_from_slice(&length.to_le_bytes());
        let outcome = read(&mut &frame[..], stage);
        let refused = matches!(outcome, Err(WireError::Body { .. } | WireError::Length { .. }));
        prop_assert!(refused || matches!(message, Message::Piece(_)), "{:?}", outcome);
    }

    #[test]
    fn messages_need_the_right_stage(message in message()) {
        for stage in [Stage::Introduction, Stage::Rendezvous, Stage::Group] {
            let outcome = read(&mut &message.frame()[..], stage);
            if stage == stage_of(&message) {
                prop_assert!(outcome.is_ok());
            } else {
                prop_assert_eq!(outcome, Err(WireError::Unexpected(message.frame()[0])));
            }
        }
    }

    #[test]
    fn any_bytes_parse_or_fail(number in any::<u8>(), bytes in vec(any::<u8>(), 0..200)) {
        let mut frame = vec![number];
        frame.extend((bytes.len() as u32).to_le_bytes());
        frame.extend(&bytes);
        for stage in [Stage::Introduction, Stage::Rendezvous, Stage::Group] {
            if let Ok(message) = read(&mut &frame[..], stage) {
                prop_assert_eq!(read(&mut &message.frame()[..], stage), Ok(message));
            }
        }
    }
}

/// A stream with only a header, which fails the test if more is read.
struct HeaderAlone(Vec<u8>);

impl Read for HeaderAlone {
    fn read(&mut self, place: &mut [u8]) -> std::io::Result<usize> {
        assert!(!self.0.is_empty(), "more than the header was read");
        let bytes = self.0.len().min(place.len());
        place[..bytes].copy_from_slice(&self.0[..bytes]);
        self.0.drain(..bytes);
        Ok(bytes)
    }
}

#[test]
fn excessive_lengths_are_refused_unread() {
    for (number, (stage, most)) in (0..).zip(KINDS) {
        for claimed in [most + 1, u32::MAX as usize] {
            let mut header = vec![number];
            header.extend((claimed as u32).to_le_bytes());
            let outcome = read(&mut HeaderAlone(header), stage);
            assert_eq!(outcome, Err(WireError::Length { kind: number, claimed, most }));
        }
        assert!(stage != Stage::Introduction || most <= 64, "an unauthenticated peer may send {most} bytes");
    }
}

#[test]
fn largest_messages_fit_their_bounds() {
    let text = "\u{10ffff}".repeat(300);
    let long = || clip(&text).to_string();
    let announcement = Announcement {
        sequence: u64::MAX,
        op: long(),
        element: long(),
        count: u64::MAX,
        location: long(),
        word: vec![1; MOST_WORD],
    };
    let beat = Beat { sequence: u64::MAX, op: long(), location: long(), since_ms: u64::MAX, waits_for: Some(4095) };
    let address = "[ffff:ffff:ffff:ffff:ffff:ffff:255.255.255.255]:65535".parse().expect("an address");
    let fault = |kind| RendezvousFault { found_by: 4095, ranks: 4096, address: long(), waited: Duration::MAX, kind };
    let missing = RendezvousFaultKind::Missing { ranks: (0..MOST_RANKS).collect(), seen: vec![long(); 8] };
    let failed = RankFaultKind::Failed { reason: "\u{1}".repeat(4096) };
    let last = LastHeard {
        ago: Duration::MAX,
        op: long(),
        sequence: u64::MAX,
        location: long(),
        since: Duration::MAX,
        waits_for: Some(4095),
    };
    let of_rank = RankFault {
        rank: 4095,
        ranks: MOST_RANKS,
        kind: failed,
        found_by: 4095,
        op: long(),
        sequence: u64::MAX,
        location: long(),
        waited: Duration::MAX,
        last: Some(last),
    };
    for message in [
        Message::Announce(announcement),
        Message::Beat(beat),
        Message::Missing((0..MOST_RANKS as u32).collect()),
        Message::Roster([1; 16], vec![address; MOST_RANKS]),
        Message::Piece(vec![1; MOST_PIECE]),
        Message::Refused(Box::new(fault(missing))),
        Message::Fault(Box::new(of_rank)),
    ] {
        let outcome = read(&mut &message.frame()[..], stage_of(&message));
        assert!(outcome.as_ref() == Ok(&message), "kind {}: {:?}", message.frame()[0], outcome.map(|_| ()));
    }
}

#[test]
fn a_text_is_cut_between_characters() {
    assert_eq!(clip("short"), "short");
    let text = "\u{20ac}".repeat(400);
    assert_eq!(clip(&text).len(), 1023);
    let hello = |version: &str| Hello { protocol: 1, version: version.into(), group: [0; 16], port: 0 };
    let outcome = read(&mut &Message::Hello(hello(&text)).frame()[..], Stage::Rendezvous);
    assert_eq!(outcome, Ok(Message::Hello(hello(clip(&text)))));
}

#[test]
fn longer_texts_are_refused() {
    let hello = |bytes| {
        let encoded = (1u32, "x".repeat(bytes), [0u8; 16], 0u16);
        let body = postcard::to_allocvec(&encoded).expect("a body");
        let length = (body.len() as u32).to_le_bytes();
        [&[3][..], &length, &body].concat()
    };
    let read_hello = |bytes| read(&mut &hello(bytes)[..], Stage::Rendezvous);
    assert!(matches!(read_hello(MOST_TEXT), Ok(Message::Hello(hello)) if hello.version.len() == MOST_TEXT));
    assert!(matches!(read_hello(MOST_TEXT + 1), Err(WireError::Body { kind: 3, .. })));
}

#[test]
fn excessive_element_counts_are_refused() {
    // A list that claims 2^32 - 1 elements in a body of five bytes.
    let claim = [255, 255, 255, 255, 15];
    let frame = [&[4, 5, 0, 0, 0][..], &claim].concat();
    let outcome = read(&mut &frame[..], Stage::Rendezvous);
    assert!(matches!(outcome, Err(WireError::Body { kind: 4, .. })), "{outcome:?}");
}

#[test]
fn handshake_messages_fit_their_bound() {
    assert_eq!(MOST_HANDSHAKE, crate::channel::CALL.max(crate::channel::ANSWER));
}

/// A greeting of versions 1 to 3: the magic, a random number, and two small ranks.
#[test]
fn an_old_greeting_is_named() {
    for nonce in [0, 7, 255] {
        let body = [&OLD_MAGIC[..], &[nonce; 32], &[1, 4]].concat();
        let frame = [&[GREETING][..], &(body.len() as u32).to_le_bytes(), &body].concat();
        let error = read(&mut &frame[..], Stage::Introduction).expect_err("a frame of another protocol must fail");
        assert_eq!(error, WireError::OldProtocol);
        let text = error.to_string();
        assert!(text.contains("messages of version 3 or less, here 4") && text.contains("same program"), "{text}");
    }
}

#[test]
fn another_greeting_is_refused() {
    let mut frame = Message::Greeting(Greeting::new(0, 1)).frame();
    frame[HEADER] ^= 1;
    let outcome = read(&mut &frame[..], Stage::Introduction);
    assert_eq!(
        outcome,
        Err(WireError::Body { kind: 0, what: "another greeting; build all ranks with the same features" })
    );
}

/// The numbers of kinds are part of the protocol.
#[test]
fn kinds_keep_their_numbers() {
    let messages = [
        Message::Greeting(Greeting::new(0, 1)),
        Message::Handshake(Vec::new()),
        Message::Denied,
        Message::Hello(Hello { protocol: PROTOCOL, version: String::new(), group: [0; 16], port: 0 }),
        Message::Missing(Vec::new()),
        Message::Roster([0; 16], Vec::new()),
        Message::Ready,
        Message::Go,
    ];
    for (number, message) in (0..).zip(&messages) {
        assert_eq!(message.frame()[0], number, "{message:?}");
    }
    assert_eq!([Message::Bye.frame()[0], Message::Piece(Vec::new()).frame()[0]], [PIECE - 1, PIECE]);
}

#[test]
fn invalid_ranks_are_refused() {
    for (rank, ranks) in [(0, 0), (3, 3), (1, MOST_RANKS as u32 + 1), (u32::MAX, u32::MAX)] {
        let frame = Message::Greeting(Greeting::new(rank, ranks)).frame();
        let outcome = read(&mut &frame[..], Stage::Introduction);
        assert!(matches!(outcome, Err(WireError::Body { .. })), "rank {rank} of {ranks}: {outcome:?}");
    }
}

/// Returns one message of each kind, by stage. The fuzz target of messages starts from them.
fn corpus() -> [(&'static str, Vec<Message>); 3] {
    let call = "train/src/main.rs:57:21";
    let rendezvous = RendezvousFault {
        found_by: 0,
        ranks: 4,
        address: "spark-1:29500".into(),
        waited: Duration::from_millis(30_000),
        kind: RendezvousFaultKind::Missing { ranks: vec![2, 3], seen: vec!["a caller from 10.0.0.9".into()] },
    };
    let last = LastHeard {
        ago: Duration::from_millis(150),
        op: "update".into(),
        sequence: 6,
        location: call.into(),
        since: Duration::from_secs(5),
        waits_for: Some(3),
    };
    let fault = RankFault {
        rank: 2,
        ranks: 4,
        kind: RankFaultKind::Failed { reason: "the loss is not finite".into() },
        found_by: 2,
        op: "update".into(),
        sequence: 7,
        location: call.into(),
        waited: Duration::ZERO,
        last: Some(last),
    };
    let hello = Hello { protocol: PROTOCOL, version: "0.2.0".into(), group: [0; 16], port: 40_001 };
    let roster = ["10.0.0.1:29500", "10.0.0.2:40001", "[fd00::3]:40002"].map(|at| at.parse().expect("an address"));
    let announcement = Announcement {
        sequence: 7,
        op: "update".into(),
        element: "f32".into(),
        count: 124_439_808,
        location: call.into(),
        word: br#"[["samples","32"]]"#.to_vec(),
    };
    let beat = Beat { sequence: 7, op: "update".into(), location: call.into(), since_ms: 1_250, waits_for: Some(3) };
    [
        (
            "introduction",
            vec![
                Message::Greeting(Greeting::new(1, 4)),
                Message::Handshake((0..MOST_HANDSHAKE as u8).collect()),
                Message::Denied,
            ],
        ),
        (
            "rendezvous",
            vec![
                Message::Hello(hello),
                Message::Missing(vec![2, 3]),
                Message::Roster([7; 16], roster.to_vec()),
                Message::Ready,
                Message::Go,
                Message::Refused(Box::new(rendezvous)),
            ],
        ),
        (
            "group",
            vec![
                Message::Announce(announcement),
                Message::Beat(beat),
                Message::Begin(5),
                Message::Fault(Box::new(fault)),
                Message::Bye,
                Message::Piece(vec![1, 2, 3, 4, 5]),
            ],
        ),
    ]
}

/// The committed corpus has the messages of this protocol. `cargo xtask generate corpus` rewrites
/// it.
#[test]
fn fuzz_corpus_is_current() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/group");
    let mut kinds = Vec::new();
    for (name, messages) in corpus() {
        let frames: Vec<_> = messages.iter().map(Message::frame).collect();
        kinds.extend(frames.iter().map(|frame| frame[0]));
        let (path, frames) = (format!("{folder}/{name}"), frames.concat());
        if std::env::var_os("STEPSCOPE_WRITE_CORPUS").is_some() {
            std::fs::write(&path, &frames).expect("the corpus can be written");
        }
        let committed = std::fs::read(&path).expect("a committed file");
        assert!(committed == frames, "{path} has messages of another protocol; run cargo xtask generate corpus");
    }
    assert_eq!(kinds, (0..=PIECE).collect::<Vec<_>>(), "the corpus must contain every kind of message, in order");
}
