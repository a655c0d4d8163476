//! `aryk`: the daemon's command line for people.
//!
//! Each command is one or a few JSON-RPC calls to `arykd`, and a few lines about what they gave. With `--json` it prints
//! JSON instead. What it needs of the daemon is in the calls: it knows nothing that another client could not.
#![forbid(unsafe_code)]

mod apply;
mod cli;
mod client;
mod commands;
mod doctor;
mod error;
mod output;
mod size;

use clap::Parser;
use cli::{Cli, Command};
use client::Client;
use error::Error;
use output::Output;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("aryk: {error}");
            if let Some(hint) = error.hint() {
                eprintln!("{hint}");
            }
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(cli: &Cli) -> Result<ExitCode, Error> {
    let out = Output::new(cli.json);
    match cli.command {
        Command::Completions { shell } => return out.completions(shell).map(|()| ExitCode::SUCCESS),
        Command::Doctor => return doctor::run(cli, &out).map(|()| ExitCode::SUCCESS),
        _ => {}
    }
    let mut client = Client::connect(&cli.socket, cli.timeout)?;
    let done = match &cli.command {
        Command::Apply(args) => return apply::apply(args, &mut client, &out),
        Command::Export => apply::export(&mut client, &out),
        Command::Disk(command) => commands::disk::run(command, &mut client, &out),
        Command::Attach(args) => commands::controller::attach(args, &mut client, &out),
        Command::Detach { name } => commands::controller::detach(name, &mut client, &out),
        Command::Controller(cli::ControllerCommand::List) => commands::controller::list(&mut client, &out),
        Command::Status => commands::daemon::status(&mut client, &out),
        Command::Reactor(cli::ReactorCommand::List) => commands::daemon::reactors(&mut client, &out),
        Command::Rpc { method, params } => {
            commands::daemon::rpc(method, params.as_deref(), &mut client, &out)
        }
        Command::Completions { .. } | Command::Doctor => unreachable!("handled above"),
    };
    done.map(|()| ExitCode::SUCCESS)
}
