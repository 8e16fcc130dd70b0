//! Any bytes as what a datagram socket of the family `warp` hears: questions, answers, headers; and any order of questions, answers
//! and time for the one who asks.
//!
//! What must hold whatever comes: nothing panics, what is understood is said in the same bytes, nothing is learnt that was not
//! asked for, and nothing grows without a limit.
#![no_main]

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use warpwire::sock::warp::{Card, Due, Found, HEADER_LEN, Header, Resolver, WORDS_LEN, Words};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(words) = Words::read(bytes) {
        assert_eq!(&words.bytes()[..], bytes);
    }
    if let Some(header) = bytes.get(..HEADER_LEN)
        && let Ok(read) = Header::read(header)
    {
        assert_eq!(&read.bytes()[..], header);
    }
    resolve(bytes);
});

/// Three bytes each are a step: what, whom, and how much.
fn resolve(bytes: &[u8]) {
    let mut now = Instant::now();
    let mut names = Resolver::<u8>::new();
    let mut asked = 0_usize;
    for step in bytes.chunks_exact(3) {
        let (what, whom, much) = (step[0] % 7, step[1], step[2]);
        let to = SocketAddr::from(([10, 0, 0, whom % 4], 1 + u16::from(whom)));
        match what {
            0 => {
                let is_new = matches!(names.find(now, to), Found::Unknown) && names.may_ask();
                let begun = names.ask(now, to, to, u64::from(much));
                assert!(begun || !is_new);
                asked += usize::from(begun);
            }
            1 => now += Duration::from_millis(u64::from(much) * 8),
            2 => {
                if let Some(name) = names.answered(u64::from(much), to) {
                    assert_eq!(name, to, "an answer is for whom it names");
                    asked -= 1;
                    let card = Card { port: 1, qpn: 1, qkey: 1, longest: u32::from(much) };
                    if !names.confirm(now, to, &card) {
                        names.learn(now, to, card, much);
                    }
                    assert!(matches!(names.find(now, to), Found::Known { .. }));
                }
            }
            3 => drop(names.find(now, to)),
            4 => {
                let before = names.asked_for(now, to).is_some();
                names.forget(to);
                asked -= usize::from(before);
                assert_eq!(names.find(now, to), Found::Unknown);
            }
            5 => names.forget_known(),
            _ => {}
        }
        let mut turns = 0;
        while let Some(due) = names.due(now) {
            match due {
                Due::Ask { words, .. } => assert_eq!(words.bytes().len(), WORDS_LEN),
                Due::GivenUp { to } => {
                    asked -= 1;
                    assert_eq!(names.find(now, to), Found::Unknown);
                }
            }
            turns += 1;
            assert!(turns <= 64, "nothing is due for ever");
        }
        assert!(asked <= 32 && (asked == 0) == names.next_due().is_none());
    }
}
