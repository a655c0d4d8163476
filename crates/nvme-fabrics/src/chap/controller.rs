//! The controller's side of an authentication. Any context that may compute for milliseconds.

use super::group::Private;
use super::message::{Challenge, Negotiate, OfHost, Reply, Success1, failure1};
use super::{Allowed, Failure, Hash, Parties, Secrets, Session, challenge, sequence};
use ring::hmac;
use std::sync::Arc;

/// How far an authentication is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It has not begun, or goes on.
    Pending,
    /// The host has proved that it knows its secret, and has accepted the controller's proof if it wanted one.
    Authenticated,
    /// It has failed: the connection ends.
    Failed(Failure),
}

#[derive(Debug)]
enum State {
    /// Negotiate comes next.
    Idle,
    /// Challenge is to be sent, and Reply comes next.
    Challenging { is_sent: bool, challenge: Challenge, private: Option<Private> },
    /// Success1 is to be sent. `is_last`: nothing comes afterwards.
    Succeeding { success: Success1, is_last: bool },
    /// Success2 comes next.
    Proved,
    /// Failure1 is to be sent.
    Failing(Failure),
}

/// The controller's side. It may be used again after a success: a host authenticates again when it likes.
#[derive(Debug)]
pub struct Controller {
    session: Session,
    allowed: Allowed,
    state: State,
    progress: Progress,
}

impl Controller {
    /// The start of an authentication.
    pub fn new(secrets: Arc<Secrets>, parties: Parties, allowed: Allowed) -> Self {
        Self {
            session: Session { secrets, parties, transaction: 0, hash: Hash::Sha256, shared: None },
            allowed,
            state: State::Idle,
            progress: Progress::Pending,
        }
    }

    /// How far the authentication is. While a host authenticates again, this is [`Progress::Pending`].
    pub const fn progress(&self) -> Progress {
        self.progress
    }

    /// Why the authentication has failed, also if the host has not been told yet.
    pub const fn failure(&self) -> Option<Failure> {
        match (self.progress, &self.state) {
            (Progress::Failed(failure), _) => Some(failure),
            (_, State::Failing(failure)) => Some(*failure),
            _ => None,
        }
    }

    /// Takes the message of an Authentication Send. This may take tens of milliseconds. What is wrong is reported by the next
    /// message.
    pub fn receive(&mut self, message: &[u8]) {
        let taken = OfHost::decode(message).and_then(|message| self.take(message));
        if let Err(failure) = taken {
            self.state = State::Failing(failure);
        }
    }

    fn take(&mut self, message: OfHost) -> Result<(), Failure> {
        let state = std::mem::replace(&mut self.state, State::Idle);
        match (message, state) {
            (_, State::Failing(failure)) => Err(failure),
            // A host may begin again at any time.
            (OfHost::Negotiate(negotiate), _) => self.negotiate(&negotiate),
            (OfHost::Reply(reply), State::Challenging { is_sent: true, challenge, private }) => {
                self.check(&reply, &challenge, private)
            }
            (OfHost::Success2 { transaction }, State::Proved) if transaction == self.session.transaction => {
                self.progress = Progress::Authenticated;
                Ok(())
            }
            (OfHost::Failure2(failure), _) => {
                self.progress = Progress::Failed(failure);
                Err(failure)
            }
            _ => Err(Failure::Message),
        }
    }

    fn negotiate(&mut self, negotiate: &Negotiate) -> Result<(), Failure> {
        self.progress = Progress::Pending;
        let Allowed { hashes, groups } = &self.allowed;
        let hash = hashes.iter().find(|hash| negotiate.hashes.contains(hash)).ok_or(Failure::Hash)?;
        let group = groups.iter().find(|group| negotiate.groups.contains(group)).ok_or(Failure::Group)?;
        let private = Private::random(*group);
        let session = &mut self.session;
        (session.transaction, session.hash, session.shared) = (negotiate.transaction, *hash, None);
        let challenge = Challenge {
            transaction: negotiate.transaction,
            hash: *hash,
            group: *group,
            sequence: sequence(),
            challenge: challenge(*hash),
            public: private.as_ref().map(Private::public).unwrap_or_default(),
        };
        self.state = State::Challenging { is_sent: false, challenge, private };
        Ok(())
    }

    fn check(&mut self, reply: &Reply, sent: &Challenge, private: Option<Private>) -> Result<(), Failure> {
        if reply.transaction != self.session.transaction || reply.proof.len() != sent.hash.value_len() {
            return Err(Failure::Payload);
        }
        match private {
            Some(private) => self.session.share(&private.agree(&reply.public)?),
            None if reply.public.is_empty() => {}
            None => return Err(Failure::Payload),
        }
        let (key, proved) = self.session.of_host(&sent.challenge, sent.sequence);
        hmac::verify(&key, &proved, &reply.proof).map_err(|_| Failure::Failed)?;
        let proof = match &reply.challenge {
            // A host that asks for what it was asked wants its own proof back.
            Some((_, asked)) if *asked == sent.challenge => return Err(Failure::Failed),
            Some((sequence, asked)) => {
                let (key, proved) = self.session.of_controller(asked, *sequence).ok_or(Failure::Failed)?;
                Some(hmac::sign(&key, &proved).as_ref().to_vec())
            }
            None => None,
        };
        let is_last = proof.is_none();
        let success = Success1 { transaction: reply.transaction, hash: sent.hash, proof };
        self.state = State::Succeeding { success, is_last };
        Ok(())
    }

    /// The message that an Authentication Receive returns. `None`: the host has to send one first.
    pub fn send(&mut self) -> Option<Vec<u8>> {
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Challenging { is_sent: false, challenge, private } => {
                let message = challenge.encode();
                self.state = State::Challenging { is_sent: true, challenge, private };
                Some(message)
            }
            State::Succeeding { success, is_last } => {
                if is_last {
                    self.progress = Progress::Authenticated;
                } else {
                    self.state = State::Proved;
                }
                Some(success.encode())
            }
            State::Failing(failure) => {
                self.progress = Progress::Failed(failure);
                self.state = State::Failing(failure);
                Some(failure1(self.session.transaction, failure))
            }
            state @ (State::Idle | State::Proved | State::Challenging { .. }) => {
                self.state = state;
                None
            }
        }
    }
}
