//! The host's side of an authentication. Any context that may compute for milliseconds.

use super::group::Private;
use super::message::{Challenge, Negotiate, OfController, Reply, Success1, failure2, success2};
use super::{Allowed, Failure, Hash, Parties, Secrets, Session, challenge, sequence};
use ring::hmac;
use std::sync::Arc;

/// What the owner does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send this message by an Authentication Send, and ask again.
    Send(Vec<u8>),
    /// Read a message by an Authentication Receive, and pass it to [`Host::receive`].
    Receive,
    /// The queue takes commands. The controller has proved that it knows its secret, if the host has one for it.
    Done,
    /// The authentication has failed: the connection ends.
    Failed(Failure),
}

#[derive(Debug)]
enum State {
    /// This message is sent next, and then comes the other state.
    Send(Vec<u8>, Box<State>),
    AwaitChallenge,
    /// Success1 comes next, with a proof for this challenge and its sequence number, if the controller is to give one.
    AwaitSuccess(Option<(u32, Vec<u8>)>),
    Done,
    Failed(Failure),
}

impl State {
    fn after(message: Vec<u8>, next: Self) -> Self {
        Self::Send(message, Box::new(next))
    }
}

/// The host's side.
#[derive(Debug)]
pub struct Host {
    session: Session,
    allowed: Allowed,
    state: State,
}

impl Host {
    /// The start of an authentication. `transaction` is another number for each authentication of a controller.
    pub fn new(secrets: Arc<Secrets>, parties: Parties, transaction: u16, allowed: &Allowed) -> Self {
        let session = Session { secrets, parties, transaction, hash: Hash::Sha256, shared: None };
        let Allowed { hashes, groups } = allowed.clone();
        let negotiate = Negotiate { transaction, hashes, groups }.encode();
        Self { session, allowed: allowed.clone(), state: State::after(negotiate, State::AwaitChallenge) }
    }

    /// What the owner does next.
    pub fn action(&mut self) -> Action {
        match &self.state {
            State::AwaitChallenge | State::AwaitSuccess(_) => return Action::Receive,
            State::Done => return Action::Done,
            State::Failed(failure) => return Action::Failed(*failure),
            State::Send(..) => {}
        }
        let State::Send(message, next) = std::mem::replace(&mut self.state, State::Done) else {
            unreachable!("the other states have returned")
        };
        self.state = *next;
        Action::Send(message)
    }

    /// Takes the message of an Authentication Receive. This may take tens of milliseconds. What is wrong is reported by the next
    /// actions.
    pub fn receive(&mut self, message: &[u8]) {
        let taken = OfController::decode(message).and_then(|message| self.take(message));
        self.state = taken.unwrap_or_else(|failure| {
            // The controller receives the reason.
            State::after(failure2(self.session.transaction, failure), State::Failed(failure))
        });
    }

    fn take(&mut self, message: OfController) -> Result<State, Failure> {
        match (message, &self.state) {
            (OfController::Failure1(failure), _) => Ok(State::Failed(failure)),
            (OfController::Challenge(challenge), State::AwaitChallenge) => self.reply(&challenge),
            (OfController::Success1(success), State::AwaitSuccess(asked)) => {
                self.check(&success, asked.as_ref())
            }
            _ => Err(Failure::Message),
        }
    }

    fn reply(&mut self, asked: &Challenge) -> Result<State, Failure> {
        let session = &mut self.session;
        if asked.transaction != session.transaction {
            return Err(Failure::Message);
        }
        if !self.allowed.hashes.contains(&asked.hash) {
            return Err(Failure::Hash);
        }
        if !self.allowed.groups.contains(&asked.group) {
            return Err(Failure::Group);
        }
        session.hash = asked.hash;
        let public = match Private::random(asked.group) {
            Some(private) => {
                session.share(&private.agree(&asked.public)?);
                private.public()
            }
            None if asked.public.is_empty() => Vec::new(),
            None => return Err(Failure::Payload),
        };
        let (key, proved) = session.of_host(&asked.challenge, asked.sequence);
        let proof = hmac::sign(&key, &proved).as_ref().to_vec();
        let challenge = session.secrets.controller.is_some().then(|| (sequence(), challenge(asked.hash)));
        let reply = Reply { transaction: session.transaction, proof, challenge, public };
        let message = reply.encode();
        Ok(State::after(message, State::AwaitSuccess(reply.challenge)))
    }

    fn check(&self, success: &Success1, asked: Option<&(u32, Vec<u8>)>) -> Result<State, Failure> {
        let session = &self.session;
        if success.transaction != session.transaction || success.hash != session.hash {
            return Err(Failure::Message);
        }
        let Some((sequence, challenge)) = asked else { return Ok(State::Done) };
        let proof = success.proof.as_ref().ok_or(Failure::Failed)?;
        let (key, proved) = session.of_controller(challenge, *sequence).ok_or(Failure::Failed)?;
        hmac::verify(&key, &proved, proof).map_err(|_| Failure::Failed)?;
        Ok(State::after(success2(session.transaction), State::Done))
    }
}
