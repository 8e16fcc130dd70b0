//! Software HCAs by the local address that they are bound to, opened on first use.

use crate::error::{Error, Kind, Result};
use crate::verbs::Context;

/// Maximum number of devices in use. A device has a thread and some ten descriptors.
const MAX_DEVICES: usize = 32;

/// The open devices; `K` is what distinguishes local addresses.
///
/// A peer chooses the local address of its connection among all that a listener has: with a
/// wildcard address, 127.0.0.0/8 alone has 16 million. So devices without connections are closed
/// before another one is opened, and their number is bounded.
pub(in crate::sock) struct DevicesByAddress<K>(Vec<(K, Context)>);

impl<K> Default for DevicesByAddress<K> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<K: PartialEq> DevicesByAddress<K> {
    /// The device for this local address, opened by `open` if there is none.
    ///
    /// # Errors
    /// [`Kind::Busy`] if connections use devices of too many other addresses; that of `open`.
    pub(in crate::sock) fn get(
        &mut self,
        local: K,
        open: impl FnOnce() -> Result<Context>,
    ) -> Result<Context> {
        if let Some((_, context)) = self.0.iter().find(|(bound, _)| *bound == local) {
            return Ok(context.clone());
        }
        self.0.retain(|(_, context)| context.is_in_use());
        if self.0.len() >= MAX_DEVICES {
            return Err(Error::new(Kind::Busy, "open a device for a connection")
                .why(format!("connections use devices at {MAX_DEVICES} other local addresses"))
                .fix("listen on one address, or open the device and pass it"));
        }
        let context = open()?;
        self.0.push((local, context.clone()));
        Ok(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hca::{HcaOptions, ProgressMode};
    use crate::link::Hub;

    #[test]
    fn unused_devices_are_closed_and_those_in_use_are_bounded() {
        let hub = Hub::new();
        let mut devices = DevicesByAddress::default();
        let mut get = |number: u16| {
            let held = devices.get(number, || {
                let address = ([10, 0, (number >> 8) as u8, number as u8], 4791).into();
                let options = HcaOptions::default().with_progress_mode(ProgressMode::Manual);
                Context::open_with(hub.endpoint(address)?, options)
            });
            (held, devices.0.len())
        };
        for number in 1..500 {
            let (held, count) = get(number);
            assert_eq!((held.is_ok(), count), (true, 1), "{number}");
        }
        // A completion queue uses its device, as every object does.
        let held: Vec<_> = (1000..1000 + MAX_DEVICES as u16)
            .map(|number| get(number).0.unwrap().create_cq(1).unwrap())
            .collect();
        let (refused, count) = get(1);
        assert_eq!((refused.unwrap_err().kind(), count), (&Kind::Busy, MAX_DEVICES));
        assert!(get(1000).0.is_ok(), "one that is open");
        drop(held);
        let (opened, count) = get(1);
        assert_eq!((opened.is_ok(), count), (true, 1));
    }
}
