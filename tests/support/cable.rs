//! A connection between two ranks that a test can cut.
//!
//! Invariant: data from one end arrives unchanged at the other until it is cut. Afterwards no data
//! is passed on, and no connection is accepted.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

/// Returns a free port of this host, outside the range that the system gives to outgoing
/// connections.
pub(crate) fn free_port() -> u16 {
    let candidates = std::iter::repeat_with(|| 20_000 + (RandomState::new().build_hasher().finish() % 10_000) as u16);
    candidates.take(1000).find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).expect("a free port")
}

/// Both ends of all connections, or `None` after the cut.
type Ends = Arc<Mutex<Option<Vec<TcpStream>>>>;

/// A proxy to call in place of another address.
pub(crate) struct Cable {
    pub(crate) address: String,
    ends: Ends,
}

impl Cable {
    /// Returns a cable to the listener at this address, which may start later.
    pub(crate) fn to(address: String) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
        let cable = Self { address: listener.local_addr().expect("an address").to_string(), ends: Ends::default() };
        *cable.ends.lock().unwrap() = Some(Vec::new());
        let ends = cable.ends.clone();
        thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let mut ends = ends.lock().unwrap();
                let Some(ends) = &mut *ends else { return };
                // If nothing listens there yet, the caller's connection closes, and it calls again.
                let Ok(far) = TcpStream::connect(&address) else { continue };
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (mut from, mut to) = (from.try_clone().expect("a handle"), to.try_clone().expect("a handle"));
                    thread::spawn(move || {
                        let _ = io::copy(&mut from, &mut to);
                        // One end sends no more; the other still may.
                        let _ = to.shutdown(Shutdown::Write);
                    });
                }
                ends.extend([near, far]);
            }
        });
        cable
    }

    /// Cuts the cable.
    pub(crate) fn cut(&self) {
        let ends = self.ends.lock().unwrap().take();
        for end in ends.into_iter().flatten() {
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        self.cut();
        // Wakes the accepting thread, so that it sees the cut.
        let _ = TcpStream::connect(&self.address);
    }
}
