use super::*;
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::HashSet;

const SECRET: &[u8] = b"a secret of this test alone";
const PROLOGUE: &[u8] = b"rank 2 of 4";

fn secret() -> Secret {
    Secret::new(SECRET)
}

/// Returns the keys of the end that connected, and of the other.
fn keys() -> (Keys, Keys) {
    let (handshake, call) = Handshake::call(&secret(), PROLOGUE).expect("random numbers");
    let (answer, server) = Handshake::answer(&secret(), PROLOGUE, &call, 3).expect("the secret is the same");
    let (rank, client) = handshake.read_answer(&answer).expect("the secret is the same");
    assert_eq!((rank, call.len(), answer.len()), (3, CALL, ANSWER));
    (client, server)
}

/// Returns all that a stream of these bytes contains, and how it ended.
fn opened(opener: &mut Opener, bytes: &[u8]) -> (Vec<u8>, Option<ErrorKind>) {
    let mut content = Vec::new();
    let end = opener.open(bytes).read_to_end(&mut content);
    (content, end.err().map(|error| error.kind()))
}

/// Returns the records of some sealed bytes.
fn records(mut sealed: &[u8]) -> Vec<Vec<u8>> {
    let mut records = Vec::new();
    while !sealed.is_empty() {
        let length = LENGTH + usize::from(u16::from_le_bytes([sealed[0], sealed[1]]));
        records.push(sealed[..length].to_vec());
        sealed = &sealed[length..];
    }
    records
}

#[test]
fn every_handshake_message_is_authenticated() {
    let (handshake, call) = Handshake::call(&secret(), PROLOGUE).expect("random numbers");
    let refused = |secret: &Secret, prologue: &[u8], call: &[u8]| {
        Handshake::answer(secret, prologue, call, 3).map(|(answer, _)| answer) == Err(Refusal::Secret)
    };
    assert!(!refused(&secret(), PROLOGUE, &call));
    assert!(refused(&Secret::new(b"a different group secret"), PROLOGUE, &call));
    assert!(refused(&Secret::default(), PROLOGUE, &call));
    assert!(refused(&secret(), b"rank 3 of 4", &call));
    assert!(refused(&secret(), b"rank 2 of 5", &call));
    for bit in 0..8 * call.len() {
        let mut other = call.clone();
        other[bit / 8] ^= 1 << (bit % 8);
        assert!(refused(&secret(), PROLOGUE, &other), "bit {bit}");
    }
    for end in 0..call.len() {
        assert!(refused(&secret(), PROLOGUE, &call[..end]), "{end} bytes");
    }
    assert!(refused(&secret(), PROLOGUE, &[&call[..], &[0]].concat()));
    // The call itself is no answer.
    assert_eq!(handshake.read_answer(&call).map(|(rank, _)| rank), Err(Refusal::Secret));
}

#[test]
fn an_answer_belongs_to_one_call() {
    let (_, call) = Handshake::call(&secret(), PROLOGUE).expect("random numbers");
    let (answer, _) = Handshake::answer(&secret(), PROLOGUE, &call, 3).expect("the secret is the same");
    let (other, _) = Handshake::call(&secret(), PROLOGUE).expect("random numbers");
    assert_eq!(other.read_answer(&answer).map(|(rank, _)| rank), Err(Refusal::Secret));
    // The same call twice has another answer and other keys each time.
    let (again, _) = Handshake::answer(&secret(), PROLOGUE, &call, 3).expect("the secret is the same");
    assert_ne!(answer, again);
    for bit in 0..8 * ANSWER {
        let (handshake, call) = Handshake::call(&secret(), PROLOGUE).expect("random numbers");
        let (mut answer, _) = Handshake::answer(&secret(), PROLOGUE, &call, 3).expect("the secret is the same");
        answer[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(handshake.read_answer(&answer).map(|(rank, _)| rank), Err(Refusal::Secret), "bit {bit}");
    }
}

#[test]
fn records_of_other_connections_are_refused() {
    let ((mut client, mut server), (mut other, _)) = (keys(), keys());
    let sealed = other.sealer.seal(b"hello");
    assert_eq!(opened(&mut server.opener, &sealed), (Vec::new(), Some(ErrorKind::InvalidData)));
    // A record that is sent back is not of the other end.
    let sealed = client.sealer.seal(b"hello");
    assert_eq!(opened(&mut client.opener, &sealed), (Vec::new(), Some(ErrorKind::InvalidData)));
    assert_eq!(opened(&mut server.opener, &sealed), (b"hello".to_vec(), None));
    // And one that is repeated has another number.
    assert_eq!(opened(&mut server.opener, &sealed), (Vec::new(), Some(ErrorKind::InvalidData)));
}

#[test]
fn long_contents_become_several_records() {
    for bytes in [0, 1, MOST_OPENED - 1, MOST_OPENED, MOST_OPENED + 1, 3 * MOST_OPENED + 7] {
        let (mut client, mut server) = keys();
        let content: Vec<u8> = (0..bytes).map(|at| ((at * 7) >> 3) as u8).collect();
        let sealed = client.sealer.seal(&content);
        assert_eq!(records(&sealed).len(), bytes.div_ceil(MOST_OPENED));
        assert_eq!(opened(&mut server.opener, &sealed), (content, None));
        assert!(server.opener.is_drained());
    }
}

#[test]
fn no_record_shows_its_content() {
    let (mut client, _) = keys();
    let content = [b'x'; 64];
    let sealed: Vec<_> = (0..100).map(|_| client.sealer.seal(&content)).collect();
    assert_eq!(sealed.iter().collect::<HashSet<_>>().len(), sealed.len());
    assert!(sealed.iter().all(|record| !record.windows(8).any(|bytes| *bytes == content[..8])));
}

/// A record without room for its tag.
#[test]
fn short_records_are_refused() {
    for length in 0..TAG {
        let (_, mut server) = keys();
        let record = [&(length as u16).to_le_bytes()[..], &vec![0; length]].concat();
        assert_eq!(opened(&mut server.opener, &record), (Vec::new(), Some(ErrorKind::InvalidData)), "{length} bytes");
    }
}

proptest! {
    #[test]
    fn contents_arrive_whole_and_in_order(contents in vec(vec(any::<u8>(), 0..300), 0..8)) {
        let (mut client, mut server) = keys();
        for (from, to) in [(&mut client.sealer, &mut server.opener), (&mut server.sealer, &mut client.opener)] {
            let sealed: Vec<u8> = contents.iter().flat_map(|content| from.seal(content)).collect();
            prop_assert_eq!(opened(to, &sealed), (contents.concat(), None));
        }
    }

    #[test]
    fn altered_records_are_refused(
        contents in vec(vec(any::<u8>(), 1..60), 2..6), which in any::<prop::sample::Index>(),
        other in any::<prop::sample::Index>(), bit in any::<prop::sample::Index>(), how in 0..5usize,
    ) {
        let (mut client, mut server) = keys();
        let sealed: Vec<u8> = contents.iter().flat_map(|content| client.sealer.seal(content)).collect();
        let mut changed = records(&sealed);
        let (at, other) = (which.index(changed.len()), other.index(changed.len()));
        let intact = match how {
            // One bit of a Noise message differs.
            0 => {
                let bit = bit.index(8 * (changed[at].len() - LENGTH));
                changed[at][LENGTH + bit / 8] ^= 1 << (bit % 8);
                at
            }
            // A record is left out. Nothing shows that the last one is missing.
            1 => {
                changed.remove(at);
                at
            }
            2 => {
                changed.insert(at, changed[at].clone());
                at + 1
            }
            3 => {
                changed.swap(at, other);
                if at == other { contents.len() } else { at.min(other) }
            }
            // Another length.
            _ => {
                let bit = bit.index(16);
                changed[at][bit / 8] ^= 1 << (bit % 8);
                at
            }
        };
        let (content, end) = opened(&mut server.opener, &changed.concat());
        prop_assert_eq!(content, contents[..intact].concat());
        let is_whole = how == 1 && at == contents.len() - 1 || intact == contents.len();
        // A longer length also asks for more bytes than there are.
        let refused = end == Some(ErrorKind::InvalidData) || how == 4 && end == Some(ErrorKind::UnexpectedEof);
        prop_assert!(if is_whole && how != 2 { end.is_none() } else { refused }, "{:?}", end);
    }

    #[test]
    fn truncated_records_are_refused(content in vec(any::<u8>(), 1..200)) {
        let (mut client, mut server) = keys();
        let sealed = client.sealer.seal(&content);
        for end in 1..sealed.len() {
            let outcome = opened(&mut server.opener, &sealed[..end]);
            prop_assert_eq!(outcome, (Vec::new(), Some(ErrorKind::UnexpectedEof)), "{} bytes", end);
        }
        // None of them counted as a record.
        prop_assert_eq!(opened(&mut server.opener, &sealed), (content, None));
    }

    #[test]
    fn any_bytes_are_refused(bytes in vec(any::<u8>(), 1..400)) {
        let (_, mut server) = keys();
        let (content, end) = opened(&mut server.opener, &bytes);
        prop_assert!(content.is_empty() && end.is_some());
        let answer = Handshake::answer(&secret(), PROLOGUE, &bytes, 3).map(|(answer, _)| answer);
        prop_assert_eq!(answer, Err(Refusal::Secret));
    }
}
