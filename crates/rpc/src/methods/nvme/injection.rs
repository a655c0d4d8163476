//! `bdev_nvme_add_error_injection` and `bdev_nvme_remove_error_injection`. Control context.

use super::command::CommandType;
use super::{Control, Error, Phase, Table, find};
use aryk_bdev_nvme::{Commands, Injection};
use aryk_nvme::spec::status::Status;
use schemars::JsonSchema;
use serde::Deserialize;
use std::time::Duration;

/// The longest time for which a command is withheld.
const WITHHELD_MAX: Duration = Duration::from_secs(3600);

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "bdev_nvme_add_error_injection",
        Phase::RunTime,
        "Injects an error status into commands of an NVMe controller, as if its drive failed, until it was detached.",
        add,
    );
    table.add(
        "bdev_nvme_remove_error_injection",
        Phase::RunTime,
        "Ends the injection of an error status into commands of an NVMe controller.",
        remove,
    );
}

impl From<CommandType> for Commands {
    fn from(of: CommandType) -> Self {
        match of {
            CommandType::Admin => Self::Admin,
            CommandType::Io => Self::Io,
        }
    }
}

const fn once() -> u32 {
    1
}

/// Parameters of `bdev_nvme_add_error_injection`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Add {
    /// Name of the controller.
    name: String,
    /// Commands with data of namespaces (`io`), or all others, which include the driver's own (`admin`).
    cmd_type: CommandType,
    /// Opcode of the commands. An earlier injection into commands with it ends.
    opc: u8,
    /// Whether the drive does not get the command. Otherwise it executes the command, and the status replaces its answer.
    #[serde(default)]
    do_not_submit: bool,
    /// Microseconds after which the status comes, with `do_not_submit`; at most an hour. Default: 0. `timeout_us` does not count
    /// for I/O commands that wait.
    #[serde(default)]
    timeout_in_us: u64,
    /// Number of commands. Default: 1.
    #[serde(default = "once")]
    err_count: u32,
    /// Status code type; its lowest three bits count. `sct` and `sc` must not both be 0, which would stand for success.
    #[serde(default)]
    sct: u8,
    /// Status code.
    #[serde(default)]
    sc: u8,
}

impl Add {
    fn injection(&self) -> Result<Injection, Error> {
        let status = Status::new(u16::from(self.sct & 7) << 8 | u16::from(self.sc));
        if status.is_success() {
            return Err(Error::invalid(
                "`sct` and `sc` stand for success, not for an error: give the status of an error",
            ));
        }
        if self.err_count == 0 {
            return Err(Error::invalid("`err_count` must be at least 1"));
        }
        let after = Duration::from_micros(self.timeout_in_us);
        if after > WITHHELD_MAX {
            return Err(Error::invalid("`timeout_in_us` may be at most 3600000000, which is an hour"));
        }
        let withheld = self.do_not_submit.then_some(after);
        Ok(Injection { opcode: self.opc, status, withheld, times: self.err_count })
    }
}

async fn add(control: &Control, p: Add) -> Result<bool, Error> {
    let controller = find(control, &p.name)?;
    controller.inject(p.cmd_type.into(), p.injection()?).await?;
    Ok(true)
}

/// Parameters of `bdev_nvme_remove_error_injection`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Remove {
    /// Name of the controller.
    name: String,
    /// Commands with data of namespaces (`io`), or all others, which include the driver's own (`admin`).
    cmd_type: CommandType,
    /// Opcode of the commands. Without effect if no status is injected into commands with it.
    opc: u8,
}

async fn remove(control: &Control, p: Remove) -> Result<bool, Error> {
    find(control, &p.name)?.end_injection(p.cmd_type.into(), p.opc).await?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn injection(params: Value) -> Result<Injection, Error> {
        serde_json::from_value::<Add>(params).unwrap().injection()
    }

    #[test]
    fn parameters_stand_for_an_error_of_some_commands() {
        let spdk =
            json!({"name": "a", "opc": 2, "cmd_type": "io", "err_count": 1_111_111, "sct": 11, "sc": 33});
        let status = Status::new(0x321);
        let expected = Injection { opcode: 2, status, withheld: None, times: 1_111_111 };
        assert_eq!(injection(spdk).unwrap(), expected);
        let withheld = json!({"name": "a", "opc": 1, "cmd_type": "admin", "sc": 6, "do_not_submit": true});
        let expected =
            Injection { opcode: 1, status: Status::new(6), withheld: Some(Duration::ZERO), times: 1 };
        assert_eq!(injection(withheld).unwrap(), expected);
    }

    #[test]
    fn what_would_acknowledge_lost_data_or_never_end_is_refused() {
        for (param, value) in [("sc", 0), ("err_count", 0), ("timeout_in_us", 3_600_000_001_u64)] {
            let mut params = json!({"name": "a", "opc": 1, "cmd_type": "io", "sc": 6, "do_not_submit": true});
            params[param] = value.into();
            assert_eq!(injection(params).unwrap_err().code(), -22, "{param}");
        }
    }
}
