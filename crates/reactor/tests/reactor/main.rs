//! Whole reactors: turn by turn in virtual time, at random from a seed, and on threads of their own.

#![expect(clippy::unwrap_used, reason = "what a test sets up is there, or the test fails")]

mod drivers;
mod simulation;
mod sockets;
mod support;
mod threads;
mod turns;
