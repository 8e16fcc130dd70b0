//! The messages that two connection managers exchange: parsed and built, no I/O.
//!
//! A TCP connection belongs to one request. Every message is a header of eight bytes, magic,
//! version, kind and length of the rest, then the fields of its kind in network byte order:
//!
//! | kind | direction | fields |
//! |---|---|---|
//! | `Request` | active to passive | port space, ports, end point, parameters, private data |
//! | `Reply` | passive to active | end point, parameters, private data |
//! | `Reject` | either | reason, private data |
//! | `Ready` | active to passive | none |
//! | `Disconnect` | either | none |
//!
//! Parsing never panics, and accepts only what [`Message::build`] makes.

/// Port spaces of connections and of datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Tcp,
    Udp,
}

/// A queue pair as its peer needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EndPoint {
    pub qp_num: u32,
    /// First sequence number that it sends.
    pub psn: u32,
    pub gid: [u8; 16],
    /// MTU of its port, as verbs number it: 1 (256 bytes) to 5 (4096 bytes).
    pub mtu: u8,
    /// Of datagrams; 0 for connections.
    pub qkey: u32,
}

/// Parameters of a connection, as the sender of the message sees them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Parameters {
    /// RDMA reads and atomics that the sender answers at a time.
    pub responder_resources: u8,
    /// RDMA reads and atomics that the sender has outstanding.
    pub initiator_depth: u8,
    pub flow_control: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub srq: u8,
}

/// Private data of a program, up to [`PrivateData::MAX`] bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct PrivateData {
    bytes: [u8; Self::MAX],
    len: u8,
}

impl PrivateData {
    pub(crate) const MAX: usize = 255;
    pub(crate) const EMPTY: Self = Self { bytes: [0; Self::MAX], len: 0 };

    /// `None` if it is too long.
    pub(crate) fn new(data: &[u8]) -> Option<Self> {
        let mut made = Self::EMPTY;
        made.bytes.get_mut(..data.len())?.copy_from_slice(data);
        made.len = data.len() as u8;
        Some(made)
    }

    pub(crate) fn get(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.len)).unwrap_or_default()
    }

    /// All of it, with zeros behind.
    pub(crate) fn padded(&self) -> [u8; Self::MAX] {
        self.bytes
    }
}

impl std::fmt::Debug for PrivateData {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:02x?}", self.get())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub space: Space,
    /// Port that the peer listens on, and the sender's own.
    pub to_port: u16,
    pub from_port: u16,
    pub end_point: EndPoint,
    pub parameters: Parameters,
    pub data: PrivateData,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub end_point: EndPoint,
    pub parameters: Parameters,
    pub data: PrivateData,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    Request(Request),
    Reply(Reply),
    /// The reason has InfiniBand's numbers.
    Reject {
        reason: u16,
        data: PrivateData,
    },
    Ready,
    Disconnect,
}

/// Why bytes are no message: the connection is of no use any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ParseError {
    NotOurs,
    OtherVersion(u8),
    UnknownKind(u8),
    WrongLength,
    WrongValue,
}

impl std::fmt::Display for ParseError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotOurs => write!(f, "not a connection manager's message"),
            Self::OtherVersion(version) => {
                write!(f, "version {version}, this library has {VERSION}: install the same release")
            }
            Self::UnknownKind(kind) => write!(f, "unknown kind {kind}"),
            Self::WrongLength => write!(f, "a length that does not fit its kind"),
            Self::WrongValue => write!(f, "a value out of range"),
        }
    }
}

const MAGIC: [u8; 4] = *b"wwcm";
const VERSION: u8 = 1;
const HEADER: usize = 8;
const END_POINT: usize = 4 + 4 + 16 + 1 + 4;
const PARAMETERS: usize = 6;
/// The longest message.
pub(crate) const MAX_LEN: usize = HEADER + 5 + END_POINT + PARAMETERS + 1 + PrivateData::MAX;
/// Queue pair and sequence numbers have this many values.
const NUMBERS: u32 = 1 << 24;

/// Takes fields from the front of a message.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], ParseError> {
        let (first, rest) = self.0.split_first_chunk().ok_or(ParseError::WrongLength)?;
        self.0 = rest;
        Ok(*first)
    }

    fn u8(&mut self) -> Result<u8, ParseError> {
        self.take::<1>().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Result<u16, ParseError> {
        self.take().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Result<u32, ParseError> {
        self.take().map(u32::from_be_bytes)
    }

    fn space(&mut self) -> Result<Space, ParseError> {
        match self.u8()? {
            1 => Ok(Space::Tcp),
            2 => Ok(Space::Udp),
            _ => Err(ParseError::WrongValue),
        }
    }

    fn end_point(&mut self) -> Result<EndPoint, ParseError> {
        let (qp_num, psn) = (self.u32()?, self.u32()?);
        let (gid, mtu, qkey) = (self.take()?, self.u8()?, self.u32()?);
        if qp_num >= NUMBERS || psn >= NUMBERS || !(1..=5).contains(&mtu) {
            return Err(ParseError::WrongValue);
        }
        Ok(EndPoint { qp_num, psn, gid, mtu, qkey })
    }

    fn parameters(&mut self) -> Result<Parameters, ParseError> {
        let [responder_resources, initiator_depth, flow_control, retry_count, rnr_retry_count, srq] =
            self.take()?;
        // Retry counts have three bits.
        if retry_count > 7 || rnr_retry_count > 7 {
            return Err(ParseError::WrongValue);
        }
        Ok(Parameters {
            responder_resources,
            initiator_depth,
            flow_control,
            retry_count,
            rnr_retry_count,
            srq,
        })
    }

    /// Private data ends a message.
    fn data(&mut self) -> Result<PrivateData, ParseError> {
        let len = usize::from(self.u8()?);
        if self.0.len() != len {
            return Err(ParseError::WrongLength);
        }
        let data = PrivateData::new(self.0).ok_or(ParseError::WrongLength)?;
        self.0 = &[];
        Ok(data)
    }
}

fn put_end_point(into: &mut Vec<u8>, end_point: &EndPoint) {
    into.extend(end_point.qp_num.to_be_bytes());
    into.extend(end_point.psn.to_be_bytes());
    into.extend(end_point.gid);
    into.push(end_point.mtu);
    into.extend(end_point.qkey.to_be_bytes());
}

fn put_parameters(into: &mut Vec<u8>, of: &Parameters) {
    into.extend([of.responder_resources, of.initiator_depth, of.flow_control]);
    // What a program sets beyond three bits means the most.
    into.extend([of.retry_count.min(7), of.rnr_retry_count.min(7), of.srq]);
}

fn put_data(into: &mut Vec<u8>, data: &PrivateData) {
    into.push(data.len);
    into.extend(data.get());
}

impl Message {
    fn kind(&self) -> u8 {
        match self {
            Self::Request(_) => 1,
            Self::Reply(_) => 2,
            Self::Reject { .. } => 3,
            Self::Ready => 4,
            Self::Disconnect => 5,
        }
    }

    pub(crate) fn build(&self) -> Vec<u8> {
        let mut text = Vec::with_capacity(MAX_LEN);
        text.extend(MAGIC);
        text.extend([VERSION, self.kind(), 0, 0]);
        match self {
            Self::Request(request) => {
                text.push(match request.space {
                    Space::Tcp => 1,
                    Space::Udp => 2,
                });
                text.extend(request.to_port.to_be_bytes());
                text.extend(request.from_port.to_be_bytes());
                put_end_point(&mut text, &request.end_point);
                put_parameters(&mut text, &request.parameters);
                put_data(&mut text, &request.data);
            }
            Self::Reply(reply) => {
                put_end_point(&mut text, &reply.end_point);
                put_parameters(&mut text, &reply.parameters);
                put_data(&mut text, &reply.data);
            }
            Self::Reject { reason, data } => {
                text.extend(reason.to_be_bytes());
                put_data(&mut text, data);
            }
            Self::Ready | Self::Disconnect => {}
        }
        let len = (text.len() - HEADER) as u16;
        text[6..8].copy_from_slice(&len.to_be_bytes());
        text
    }

    /// The message at the front of `bytes`, and its length; `None` if it is not complete.
    ///
    /// # Errors
    /// If what is there cannot become a message.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, ParseError> {
        // Foreign protocols are recognised by their first bytes: nothing waits for more of them.
        let known = bytes.len().min(MAGIC.len());
        if bytes[..known] != MAGIC[..known] {
            return Err(ParseError::NotOurs);
        }
        let Some((header, rest)) = bytes.split_first_chunk::<HEADER>() else { return Ok(None) };
        let [_, _, _, _, version, kind, high, low] = *header;
        if version != VERSION {
            return Err(ParseError::OtherVersion(version));
        }
        let len = usize::from(u16::from_be_bytes([high, low]));
        if len > MAX_LEN - HEADER {
            return Err(ParseError::WrongLength);
        }
        let Some(fields) = rest.get(..len) else { return Ok(None) };
        let mut fields = Reader(fields);
        let message = match kind {
            1 => Self::Request(Request {
                space: fields.space()?,
                to_port: fields.u16()?,
                from_port: fields.u16()?,
                end_point: fields.end_point()?,
                parameters: fields.parameters()?,
                data: fields.data()?,
            }),
            2 => Self::Reply(Reply {
                end_point: fields.end_point()?,
                parameters: fields.parameters()?,
                data: fields.data()?,
            }),
            3 => Self::Reject { reason: fields.u16()?, data: fields.data()? },
            4 => Self::Ready,
            5 => Self::Disconnect,
            kind => return Err(ParseError::UnknownKind(kind)),
        };
        match fields.0 {
            [] => Ok(Some((message, HEADER + len))),
            _ => Err(ParseError::WrongLength),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end_point() -> EndPoint {
        EndPoint { qp_num: 0x80_1234, psn: 0xff_ffff, gid: [7; 16], mtu: 5, qkey: 0x0123_4567 }
    }

    fn parameters() -> Parameters {
        Parameters {
            responder_resources: 16,
            initiator_depth: 3,
            flow_control: 1,
            retry_count: 7,
            rnr_retry_count: 6,
            srq: 1,
        }
    }

    fn request() -> Request {
        Request {
            space: Space::Udp,
            to_port: 7174,
            from_port: 40000,
            end_point: end_point(),
            parameters: parameters(),
            data: PrivateData::new(b"private").unwrap(),
        }
    }

    fn messages() -> [Message; 6] {
        let all = PrivateData::new(&[9; PrivateData::MAX]).unwrap();
        let reply = Reply { end_point: end_point(), parameters: parameters(), data: all };
        [
            Message::Request(request()),
            Message::Request(Request { space: Space::Tcp, data: all, ..request() }),
            Message::Reply(reply),
            Message::Reject { reason: 28, data: PrivateData::new(b"why").unwrap() },
            Message::Ready,
            Message::Disconnect,
        ]
    }

    #[test]
    fn what_is_built_is_parsed() {
        for message in messages() {
            let mut text = message.build();
            let len = text.len();
            assert!(len <= MAX_LEN, "{len}");
            assert_eq!(Message::parse(&text), Ok(Some((message, len))));
            // More may follow.
            text.extend(Message::Ready.build());
            assert_eq!(Message::parse(&text), Ok(Some((message, len))));
        }
        assert_eq!(
            Message::Request(Request { data: messages_data(), ..request() }).build().len(),
            MAX_LEN
        );
        assert_eq!(PrivateData::new(&[0; PrivateData::MAX + 1]), None);
        assert_eq!(PrivateData::new(b"ab").unwrap().padded()[..3], [b'a', b'b', 0]);
    }

    fn messages_data() -> PrivateData {
        PrivateData::new(&[9; PrivateData::MAX]).unwrap()
    }

    #[test]
    fn a_part_of_a_message_is_not_complete() {
        for message in messages() {
            let text = message.build();
            for len in 0..text.len() {
                assert_eq!(Message::parse(&text[..len]), Ok(None), "{len} of {message:?}");
            }
        }
    }

    #[test]
    fn bad_messages_are_refused() {
        let text = Message::Request(request()).build();
        let with = |at: usize, byte: u8| {
            let mut changed = text.clone();
            changed[at] = byte;
            Message::parse(&changed)
        };
        assert_eq!(Message::parse(b"GET / HTTP/1.1"), Err(ParseError::NotOurs));
        assert_eq!(Message::parse(b"S"), Err(ParseError::NotOurs));
        assert_eq!(with(0, b'x'), Err(ParseError::NotOurs));
        assert_eq!(with(4, 2), Err(ParseError::OtherVersion(2)));
        assert_eq!(with(5, 0), Err(ParseError::UnknownKind(0)));
        assert_eq!(with(5, 9), Err(ParseError::UnknownKind(9)));
        // A length beyond every message, one that is too short for the kind, one too long for it.
        assert_eq!(with(6, 0xff), Err(ParseError::WrongLength));
        assert_eq!(with(7, 3), Err(ParseError::WrongLength));
        assert_eq!(with(5, 4), Err(ParseError::WrongLength), "Ready has no fields");
        assert_eq!(with(8, 3), Err(ParseError::WrongValue), "port space");
        assert_eq!(with(13, 1), Err(ParseError::WrongValue), "queue pair number of 25 bits");
        assert_eq!(with(17, 1), Err(ParseError::WrongValue), "sequence number of 25 bits");
        for mtu in [0, 6] {
            assert_eq!(with(37, mtu), Err(ParseError::WrongValue), "MTU");
        }
        let parameters = HEADER + 5 + END_POINT;
        assert_eq!(with(parameters + 3, 8), Err(ParseError::WrongValue), "retry count");
        assert_eq!(with(parameters + 4, 8), Err(ParseError::WrongValue), "RNR retry count");
        for len in [0, 6, 8, 255] {
            let result = with(parameters + PARAMETERS, len);
            assert_eq!(result, Err(ParseError::WrongLength), "private data of {len}");
        }
    }

    /// Every byte of every message, changed to every value: refused, or a message that is built to
    /// the same bytes.
    #[test]
    fn changed_bytes_never_panic() {
        for message in messages() {
            let text = message.build();
            for at in 0..text.len() {
                for byte in 0..=255 {
                    let mut changed = text.clone();
                    changed[at] = byte;
                    if let Ok(Some((parsed, len))) = Message::parse(&changed) {
                        assert_eq!(parsed.build(), changed[..len]);
                    }
                }
            }
        }
    }
}
