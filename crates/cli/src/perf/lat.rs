//! Latency: one message at a time.

use std::time::{Duration, Instant};

use warpwire::verbs::{Atomic, Completion, Op, Request};
use warpwire_apps::pattern::fill_bytes;

use super::bw::give_back;
use super::end::{End, INLINE, failed};
use super::table::{Figures, Row};
use super::test::Verb;
use super::word::{Done, Watch};
use crate::output::Failure;

/// At least so many, and so long: two processes that spin may begin on one core, until the scheduler parts them.
const WARM_UPS: u64 = 20;
const WARM_UP: Duration = Duration::from_millis(50);
/// More than these are counted, and not kept.
const MOST_TIMES: usize = 1 << 24;

/// After so many messages it is asked whether they come without packets; then memory is looked at so often in a row.
const CHOICE: u64 = 256;
const LOOKS: u32 = 256;

/// What both sides of a ping-pong do.
struct Player<'a> {
    end: &'a End,
    size: u64,
    /// What goes into the entry itself, where it is small and the host's.
    small: Option<[u8; INLINE as usize]>,
    /// Work whose end has not been seen.
    under_way: u64,
    /// How often memory is looked at before the device is driven.
    looks: u32,
    seen: u64,
}

pub(super) fn run(end: &End, size: u64, watch: &mut Watch<'_>) -> Result<Done, Failure> {
    let mut player = Player::new(end, size)?;
    let time = end.test.seconds.map(Duration::from_secs_f64);
    let iterations = end.test.iterations(size);
    let share = if end.test.answers() { 2 } else { 1 };
    let mut times: Vec<u32> = Vec::with_capacity(iterations.min(1 << 20) as usize);
    let (mut count, begin) = (0, Instant::now());
    while count < WARM_UPS || begin.elapsed() < WARM_UP {
        player.ping(count, watch)?;
        count += 1;
        player.choose(count);
    }
    let (begin, mut done) = (Instant::now(), 0);
    // From one post to the next is a round. The clock is looked at behind each post, while the message is under way,
    // so that it does not count as a part of the message.
    player.post(count)?;
    let mut before = Instant::now();
    while done < iterations && !time.is_some_and(|time| done > 0 && before - begin >= time) {
        player.arrive(count, watch)?;
        (count, done) = (count + 1, done + 1);
        player.post(count)?;
        let now = Instant::now();
        if times.len() < MOST_TIMES {
            let took = (now - before).as_nanos() / share;
            times.push(u32::try_from(took).unwrap_or(u32::MAX));
        }
        before = now;
    }
    player.arrive(count, watch)?;
    count += 1;
    player.drain(watch)?;
    let row = Row::new(size, done, Figures::lat(&mut times));
    Ok(Done { per_qp: vec![count], row })
}

/// The server's side: answers until the client has said something.
pub(super) fn serve(end: &End, size: u64, watch: &mut Watch<'_>) -> Result<(), Failure> {
    let mut player = Player::new(end, size)?;
    let mut count = 0;
    while player.wait(count, watch, true)? {
        player.post(count)?;
        count += 1;
        player.choose(count);
    }
    // The client has all answers; their completions may be on the way.
    player.drain_quietly(watch)
}

/// The last byte of the message with that number: never zero, and never that of the one before.
fn marker(number: u64) -> u8 {
    (number % 255) as u8 + 1
}

impl<'a> Player<'a> {
    fn new(end: &'a End, size: u64) -> Result<Self, Failure> {
        let fits = size <= u64::from(INLINE) && end.test.answers() && end.outgoing.is_host();
        let small = fits.then(|| {
            let mut bytes = [0; INLINE as usize];
            fill_bytes(&mut bytes[..size as usize], end.seed(size, 0), 0);
            bytes
        });
        Ok(Self { end, size, small, under_way: 0, looks: 1, seen: 0 })
    }

    /// Where messages come without packets, nothing need be driven for them to come: most looks go to memory alone.
    #[inline]
    fn choose(&mut self, count: u64) {
        if count.is_multiple_of(CHOICE) && self.end.test.verb == Verb::Write {
            let seen = self.end.context.stats().direct.by_peers;
            let comes = seen.wrapping_sub(std::mem::replace(&mut self.seen, seen)) >= CHOICE / 2;
            self.looks = if comes { LOOKS } else { 1 };
        }
    }

    /// One message there, and whatever tells that it arrived.
    fn ping(&mut self, number: u64, watch: &mut Watch<'_>) -> Result<(), Failure> {
        self.post(number)?;
        self.arrive(number, watch)
    }

    /// Waits for what tells that the message with that number has arrived.
    fn arrive(&mut self, number: u64, watch: &mut Watch<'_>) -> Result<(), Failure> {
        match self.end.test.verb {
            Verb::Write | Verb::Send => self.wait(number, watch, false).map(drop),
            Verb::Read | Verb::Atomic => self.drain(watch),
        }
    }

    /// Posts the message with that number.
    fn post(&mut self, number: u64) -> Result<(), Failure> {
        let end = self.end;
        let remote = end.remote(0);
        let (op, memory) = match end.test.verb {
            Verb::Write => (Op::Write(remote), &end.outgoing),
            Verb::Send => (Op::Send, &end.outgoing),
            Verb::Read => (Op::Read(remote), &end.incoming),
            Verb::Atomic => (Op::Atomic(remote, Atomic::FetchAdd { add: 1 }), &end.incoming),
        };
        let marked = end.test.verb == Verb::Write;
        let request = Request::new(number, op);
        if let Some(small) = &mut self.small {
            let bytes = &mut small[..self.size as usize];
            if marked {
                bytes[self.size as usize - 1] = marker(number);
            }
            end.qps[0].post_send(&[request.inline(bytes)])?;
        } else {
            if marked {
                end.outgoing.set_byte(self.size - 1, marker(number))?;
            }
            let range = [memory.mr.sge(0, self.size as u32)];
            end.qps[0].post_send(&[request.with(&range)])?;
        }
        self.under_way += 1;
        Ok(())
    }

    /// Spins until the message with that number is here: true; or, if that `may_end`, until the peer says something
    /// else: false.
    fn wait(&mut self, number: u64, watch: &mut Watch<'_>, may_end: bool) -> Result<bool, Failure> {
        let by_memory = self.end.test.verb == Verb::Write;
        let wanted = marker(number);
        if self.looks > 1 && self.under_way > 0 {
            // Done already, most likely, and there is time for it now.
            self.poll(watch)?;
        }
        loop {
            for _ in 0..self.looks {
                if by_memory && self.end.incoming.byte(self.size - 1)? == wanted {
                    return Ok(true);
                }
                // The peer wants the line that is looked at here.
                std::hint::spin_loop();
            }
            let (found, received) = self.poll(watch)?;
            if received {
                return Ok(true);
            }
            if !found && may_end && watch.idle()? {
                return Ok(false);
            }
            if !found && !may_end {
                watch.silent()?;
            }
        }
    }

    /// Takes one completion, if there is one; tells whether there was, and whether it was a receive.
    #[inline]
    fn poll(&mut self, watch: &Watch<'_>) -> Result<(bool, bool), Failure> {
        let mut one = [Completion::EMPTY];
        if self.end.cq.poll(&mut one)? == 0 {
            return Ok((false, false));
        }
        let [completion] = one;
        if !completion.is_success() {
            return Err(failed(&completion, &watch.peer.name));
        }
        let received = completion.is_receive();
        match received {
            true => give_back(self.end, self.size, 0, 1)?,
            false => self.under_way -= 1,
        }
        Ok((true, received))
    }

    /// Waits for the end of all work.
    fn drain(&mut self, watch: &mut Watch<'_>) -> Result<(), Failure> {
        while self.under_way > 0 {
            if !self.poll(watch)?.0 {
                watch.silent()?;
            }
        }
        Ok(())
    }

    /// As [`Player::drain`], when the peer's next word is waiting to be heard.
    fn drain_quietly(&mut self, watch: &Watch<'_>) -> Result<(), Failure> {
        let start = Instant::now();
        while self.under_way > 0 && start.elapsed() < Duration::from_secs(1) {
            self.poll(watch)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::marker;

    #[test]
    fn markers_differ_from_their_neighbours_and_from_nothing() {
        for number in 0..1000 {
            assert!(marker(number) != 0 && marker(number) != marker(number + 1));
        }
    }
}
