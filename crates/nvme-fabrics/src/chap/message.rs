//! The messages. NVMe 2.0 §8.13.3 (common ones) and §8.13.5 (DH-HMAC-CHAP). Any context.

use super::{Failure, Group, Hash};

/// AUTH_TYPE of Negotiate and of failures, and of all others.
const COMMON: u8 = 0;
const DH_HMAC_CHAP: u8 = 1;

/// AUTH_ID.
mod id {
    pub(super) const NEGOTIATE: u8 = 0x00;
    pub(super) const CHALLENGE: u8 = 0x01;
    pub(super) const REPLY: u8 = 0x02;
    pub(super) const SUCCESS1: u8 = 0x03;
    pub(super) const SUCCESS2: u8 = 0x04;
    pub(super) const FAILURE2: u8 = 0xf0;
    pub(super) const FAILURE1: u8 = 0xf1;
}

/// Bytes of a message's head, with which Challenge, Reply, Success1 and Success2 begin.
const HEAD_LEN: usize = 16;
/// Bytes before the protocols of Negotiate, and of each protocol.
const NEGOTIATE_LEN: usize = 8;
const PROTOCOL_LEN: usize = 64;
/// AUTHID of the protocol DH-HMAC-CHAP.
const PROTOCOL_ID: u8 = 1;
/// Where a protocol has its hashes and its groups, and how many of each there may be.
const HASHES: usize = 4;
const GROUPS: usize = 34;
const LIST_MAX: usize = 30;
/// RESCODE of all failures.
const AUTHENTICATION_FAILED: u8 = 1;

/// Negotiate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Negotiate {
    pub transaction: u16,
    /// What the host has. Identifiers that are not known are left out.
    pub hashes: Vec<Hash>,
    pub groups: Vec<Group>,
}

/// Challenge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Challenge {
    pub transaction: u16,
    pub hash: Hash,
    pub group: Group,
    /// S1.
    pub sequence: u32,
    /// C1, as long as a value of the hash.
    pub challenge: Vec<u8>,
    /// The controller's Diffie-Hellman value; empty without a group.
    pub public: Vec<u8>,
}

/// Reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reply {
    pub transaction: u16,
    pub proof: Vec<u8>,
    /// S2 and C2, if the controller is to prove that it knows its secret.
    pub challenge: Option<(u32, Vec<u8>)>,
    /// The host's Diffie-Hellman value.
    pub public: Vec<u8>,
}

/// Success1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Success1 {
    pub transaction: u16,
    pub hash: Hash,
    /// The controller's proof.
    pub proof: Option<Vec<u8>>,
}

/// A message of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum OfHost {
    Negotiate(Negotiate),
    Reply(Reply),
    Success2 { transaction: u16 },
    Failure2(Failure),
}

/// A message of a controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum OfController {
    Challenge(Challenge),
    Success1(Success1),
    Failure1(Failure),
}

/// A part of a message, which is malformed if it is too short.
fn part(bytes: &[u8], at: usize, len: usize) -> Result<&[u8], Failure> {
    bytes.get(at..).and_then(|rest| rest.get(..len)).ok_or(Failure::Payload)
}

/// A message, of which at least the head is there. What is behind its end is ignored: the command may transfer more.
struct Head<'a> {
    kind: (u8, u8),
    transaction: u16,
    bytes: &'a [u8],
}

impl<'a> Head<'a> {
    fn of(bytes: &'a [u8]) -> Result<Self, Failure> {
        let head: &[u8; NEGOTIATE_LEN] = bytes.first_chunk().ok_or(Failure::Payload)?;
        let transaction = u16::from_le_bytes([head[4], head[5]]);
        Ok(Self { kind: (head[0], head[1]), transaction, bytes })
    }

    fn byte(&self, at: usize) -> Result<u8, Failure> {
        part(self.bytes, at, 1).map(|part| part[0])
    }

    fn u16(&self, at: usize) -> Result<u16, Failure> {
        Ok(u16::from_le_bytes([self.byte(at)?, self.byte(at + 1)?]))
    }

    fn u32(&self, at: usize) -> Result<u32, Failure> {
        Ok(u32::from(self.u16(at)?) | u32::from(self.u16(at + 2)?) << 16)
    }

    /// `len` bytes from `at` on.
    fn vec(&self, at: usize, len: usize) -> Result<Vec<u8>, Failure> {
        part(self.bytes, at, len).map(<[u8]>::to_vec)
    }

    fn failure(&self) -> Result<Failure, Failure> {
        self.byte(7).map(Failure::with_code)
    }
}

/// The start of a message.
fn head(kind: u8, id: u8, transaction: u16, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    bytes[0] = kind;
    bytes[1] = id;
    bytes[4..6].copy_from_slice(&transaction.to_le_bytes());
    bytes
}

fn failure(id: u8, transaction: u16, failure: Failure) -> Vec<u8> {
    let mut bytes = head(COMMON, id, transaction, HEAD_LEN);
    bytes[6..8].copy_from_slice(&[AUTHENTICATION_FAILED, failure as u8]);
    bytes
}

/// Failure1, which a controller sends.
pub(super) fn failure1(transaction: u16, of: Failure) -> Vec<u8> {
    failure(id::FAILURE1, transaction, of)
}

/// Failure2, which a host sends.
pub(super) fn failure2(transaction: u16, of: Failure) -> Vec<u8> {
    failure(id::FAILURE2, transaction, of)
}

/// Success2.
pub(super) fn success2(transaction: u16) -> Vec<u8> {
    head(DH_HMAC_CHAP, id::SUCCESS2, transaction, HEAD_LEN)
}

impl Negotiate {
    fn decode(head: &Head<'_>) -> Result<Self, Failure> {
        let (concatenation, protocols) = (head.byte(6)?, usize::from(head.byte(7)?));
        if concatenation != 0 {
            return Err(Failure::Concatenation);
        }
        let all = part(head.bytes, NEGOTIATE_LEN, protocols * PROTOCOL_LEN)?;
        let mut protocols = all.as_chunks::<PROTOCOL_LEN>().0.iter();
        let protocol = protocols.find(|protocol| protocol[0] == PROTOCOL_ID).ok_or(Failure::Protocol)?;
        let (hashes, groups) = (usize::from(protocol[2]), usize::from(protocol[3]));
        if hashes > LIST_MAX || groups > LIST_MAX {
            return Err(Failure::Payload);
        }
        Ok(Self {
            transaction: head.transaction,
            hashes: protocol[HASHES..][..hashes].iter().filter_map(|id| Hash::with_id(*id)).collect(),
            groups: protocol[GROUPS..][..groups].iter().filter_map(|id| Group::with_id(*id)).collect(),
        })
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = head(COMMON, id::NEGOTIATE, self.transaction, NEGOTIATE_LEN + PROTOCOL_LEN);
        bytes[7] = 1;
        let protocol = &mut bytes[NEGOTIATE_LEN..];
        protocol[0] = PROTOCOL_ID;
        protocol[2] = self.hashes.len() as u8;
        protocol[3] = self.groups.len() as u8;
        let hashes = self.hashes.iter().map(|hash| *hash as u8);
        protocol[HASHES..GROUPS].iter_mut().zip(hashes).for_each(|(to, id)| *to = id);
        let groups = self.groups.iter().map(|group| *group as u8);
        protocol[GROUPS..].iter_mut().zip(groups).for_each(|(to, id)| *to = id);
        bytes
    }
}

impl Challenge {
    fn decode(head: &Head<'_>) -> Result<Self, Failure> {
        let hash = Hash::with_id(head.byte(8)?).ok_or(Failure::Hash)?;
        let group = Group::with_id(head.byte(9)?).ok_or(Failure::Group)?;
        if usize::from(head.byte(6)?) != hash.value_len() {
            return Err(Failure::Hash);
        }
        let public_len = usize::from(head.u16(10)?);
        Ok(Self {
            transaction: head.transaction,
            hash,
            group,
            sequence: head.u32(12)?,
            challenge: head.vec(HEAD_LEN, hash.value_len())?,
            public: head.vec(HEAD_LEN + hash.value_len(), public_len)?,
        })
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = head(DH_HMAC_CHAP, id::CHALLENGE, self.transaction, HEAD_LEN);
        bytes[6] = self.hash.value_len() as u8;
        bytes[8] = self.hash as u8;
        bytes[9] = self.group as u8;
        bytes[10..12].copy_from_slice(&(self.public.len() as u16).to_le_bytes());
        bytes[12..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes.extend_from_slice(&self.challenge);
        bytes.extend_from_slice(&self.public);
        bytes
    }
}

impl Reply {
    fn decode(head: &Head<'_>) -> Result<Self, Failure> {
        let len = usize::from(head.byte(6)?);
        let (has_challenge, public_len) = (head.byte(8)? & 1 != 0, usize::from(head.u16(10)?));
        let sequence = head.u32(12)?;
        let challenge = head.vec(HEAD_LEN + len, len)?;
        Ok(Self {
            transaction: head.transaction,
            proof: head.vec(HEAD_LEN, len)?,
            challenge: has_challenge.then_some((sequence, challenge)),
            public: head.vec(HEAD_LEN + 2 * len, public_len)?,
        })
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let len = self.proof.len();
        let mut bytes = head(DH_HMAC_CHAP, id::REPLY, self.transaction, HEAD_LEN);
        bytes[6] = len as u8;
        bytes[10..12].copy_from_slice(&(self.public.len() as u16).to_le_bytes());
        bytes.extend_from_slice(&self.proof);
        match &self.challenge {
            Some((sequence, challenge)) => {
                bytes[8] = 1;
                bytes[12..16].copy_from_slice(&sequence.to_le_bytes());
                bytes.extend_from_slice(challenge);
            }
            None => bytes.resize(HEAD_LEN + 2 * len, 0),
        }
        bytes.extend_from_slice(&self.public);
        bytes
    }
}

impl Success1 {
    fn decode(head: &Head<'_>) -> Result<Self, Failure> {
        let len = usize::from(head.byte(6)?);
        let has_proof = head.byte(8)? & 1 != 0;
        let hash = Hash::ALL.into_iter().find(|hash| hash.value_len() == len).ok_or(Failure::Hash)?;
        let proof = if has_proof { Some(head.vec(HEAD_LEN, len)?) } else { None };
        Ok(Self { transaction: head.transaction, hash, proof })
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = head(DH_HMAC_CHAP, id::SUCCESS1, self.transaction, HEAD_LEN);
        bytes[6] = self.hash.value_len() as u8;
        match &self.proof {
            Some(proof) => {
                bytes[8] = 1;
                bytes.extend_from_slice(proof);
            }
            None => bytes.resize(HEAD_LEN + self.hash.value_len(), 0),
        }
        bytes
    }
}

impl OfHost {
    /// Reads a message.
    ///
    /// # Errors
    /// It is malformed, or none of a host.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Failure> {
        let head = Head::of(bytes)?;
        match head.kind {
            (COMMON, id::NEGOTIATE) => Negotiate::decode(&head).map(Self::Negotiate),
            (COMMON, id::FAILURE2) => head.failure().map(Self::Failure2),
            (DH_HMAC_CHAP, id::REPLY) => Reply::decode(&head).map(Self::Reply),
            (DH_HMAC_CHAP, id::SUCCESS2) => Ok(Self::Success2 { transaction: head.transaction }),
            _ => Err(Failure::Message),
        }
    }
}

impl OfController {
    /// Reads a message.
    ///
    /// # Errors
    /// It is malformed, or none of a controller.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Failure> {
        let head = Head::of(bytes)?;
        match head.kind {
            (COMMON, id::FAILURE1) => head.failure().map(Self::Failure1),
            (DH_HMAC_CHAP, id::CHALLENGE) => Challenge::decode(&head).map(Self::Challenge),
            (DH_HMAC_CHAP, id::SUCCESS1) => Success1::decode(&head).map(Self::Success1),
            _ => Err(Failure::Message),
        }
    }
}
