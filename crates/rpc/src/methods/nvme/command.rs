//! Admin commands of clients: health, firmware, raw commands. Control context.

use super::describe::controller_of;
use super::{Control, Error, Phase, Table, find};
use aryk_bdev_nvme::AttachedController;
use aryk_cuse::policy::{self, Verdict};
use aryk_nvme::admin::{self, Activation, Commit, Data, FirmwareDownload, Patience};
use aryk_nvme::controller::AdminAnswer;
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::log::{self, SmartLog};
use aryk_nvme::spec::opcode;
use base64::Engine as _;
use base64::alphabet::URL_SAFE;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "bdev_nvme_get_controller_health_info",
        Phase::RunTime,
        "Reads the health of an NVMe controller: temperature, wear, errors.",
        get_health,
    );
    table.add(
        "bdev_nvme_apply_firmware",
        Phase::RunTime,
        "Downloads firmware to an NVMe controller, stores it, and resets the controller to run it; requests wait meanwhile.",
        apply_firmware,
    );
    table.add(
        "bdev_nvme_send_cmd",
        Phase::RunTime,
        "Sends an admin command to an NVMe controller, unless the command would break the driver, or destroy data in use.",
        send_cmd,
    );
}

/// Parameters of methods that name an NVMe controller.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Name {
    /// Name of the controller.
    name: String,
}

/// Result of `bdev_nvme_get_controller_health_info`: the SMART log.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "NvmeHealth")]
struct Health {
    model_number: String,
    serial_number: String,
    firmware_revision: String,
    /// PCI address, path of the socket, or IP address of the target.
    traddr: String,
    /// Aryk only: what the drive warns of.
    critical_warnings: Vec<&'static str>,
    /// 0 if the drive does not report it.
    temperature_celsius: i32,
    available_spare_percentage: u8,
    available_spare_threshold_percentage: u8,
    percentage_used: u8,
    /// Units of 512,000 bytes.
    data_units_read: u64,
    /// Units of 512,000 bytes.
    data_units_written: u64,
    host_read_commands: u64,
    host_write_commands: u64,
    /// Minutes.
    controller_busy_time: u64,
    power_cycles: u64,
    power_on_hours: u64,
    unsafe_shutdowns: u64,
    media_errors: u64,
    num_err_log_entries: u64,
    warning_temperature_time_minutes: u32,
    critical_composite_temperature_time_minutes: u32,
}

async fn get_health(control: &Control, p: Name) -> Result<Health, Error> {
    let command = admin::get_log(log::SMART, u32::MAX, 0, size_of::<SmartLog>(), true);
    let (answer, identity, traddr) = match control.nvme.remotes.find(&p.name) {
        Ok(remote) => {
            let answer = succeeded(&p.name, remote.admin(command).await?)?;
            (answer, remote.info().controller, remote.config().address.ip().to_string())
        }
        Err(_) => {
            let controller = find(control, &p.name)?;
            let answer = send(&controller, command).await?;
            let info = controller.info();
            (answer, info.controller, info.location)
        }
    };
    let short = || Error::errno(Errno::PROTO, "the SMART log is shorter than its fields");
    let smart = SmartLog::decode(&answer.data).ok_or_else(short)?;
    let identity = identity.ok_or_else(|| Error::errno(Errno::AGAIN, "the controller is not ready"))?;
    let count = |bits: u128| u64::try_from(bits).unwrap_or(u64::MAX);
    Ok(Health {
        model_number: identity.model,
        serial_number: identity.serial,
        firmware_revision: identity.firmware,
        traddr,
        critical_warnings: smart.warnings().collect(),
        temperature_celsius: smart.celsius().unwrap_or_default(),
        available_spare_percentage: smart.available_spare,
        available_spare_threshold_percentage: smart.available_spare_threshold,
        percentage_used: smart.percentage_used,
        data_units_read: count(smart.data_units_read.get()),
        data_units_written: count(smart.data_units_written.get()),
        host_read_commands: count(smart.host_reads.get()),
        host_write_commands: count(smart.host_writes.get()),
        controller_busy_time: count(smart.busy_minutes.get()),
        power_cycles: count(smart.power_cycles.get()),
        power_on_hours: count(smart.power_on_hours.get()),
        unsafe_shutdowns: count(smart.unsafe_shutdowns.get()),
        media_errors: count(smart.media_errors.get()),
        num_err_log_entries: count(smart.error_log_entries.get()),
        warning_temperature_time_minutes: smart.warning_temperature_minutes.get(),
        critical_composite_temperature_time_minutes: smart.critical_temperature_minutes.get(),
    })
}

/// Sends a command that must succeed.
async fn send(controller: &AttachedController, command: admin::Command) -> Result<AdminAnswer, Error> {
    succeeded(controller.name(), controller.admin(command).await?)
}

fn succeeded(controller: &str, answer: AdminAnswer) -> Result<AdminAnswer, Error> {
    match answer.status.is_success() {
        true => Ok(answer),
        false => {
            let detail = format!("the controller '{controller}' answers: {}", answer.status);
            Err(Error::errno(Errno::IO, detail))
        }
    }
}

/// Parameters of `bdev_nvme_apply_firmware`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ApplyFirmware {
    /// Path of the image on the daemon's host.
    filename: PathBuf,
    /// Name, alias or uuid of a disk of the controller; Aryk only: or the name of the controller.
    bdev_name: String,
}

/// Bytes of a firmware image at most.
const IMAGE_MAX: u64 = 256 << 20;

async fn apply_firmware(control: &Control, p: ApplyFirmware) -> Result<String, Error> {
    let controller = match control.disks.find(&p.bdev_name) {
        Ok(bdev) => controller_of(control, &bdev).map(|(controller, _)| controller),
        Err(_) => control.nvme.controllers.find(&p.bdev_name).ok(),
    };
    let controller =
        controller.ok_or_else(|| Error::no_device("disk of an NVMe controller", &p.bdev_name))?;
    let ready = controller.info().controller;
    let info = ready.ok_or_else(|| Error::errno(Errno::AGAIN, "the controller is not ready"))?;
    let path = p.filename.clone();
    let read = tokio::task::spawn_blocking(move || read_image(&path));
    let image = read.await.map_err(|e| Error::Internal(e.to_string()))??;
    let download = FirmwareDownload::new(&image, &info).map_err(|error| Error::invalid(error.to_string()))?;
    let (name, file, bytes) = (controller.name(), p.filename.display(), image.len());
    tracing::warn!(controller = name, %file, bytes, before = info.firmware, "firmware is downloaded to the NVMe controller");
    let (mut sent, mut shown) = (0, 0);
    for command in download {
        if let Data::ToController(part) = &command.data {
            sent += part.len();
        }
        send(&controller, command).await?;
        let tenths = sent * 10 / bytes;
        if tenths > shown {
            shown = tenths;
            tracing::info!(controller = name, percent = tenths * 10, "firmware is downloaded");
        }
    }
    let answer = controller.admin(admin::commit_firmware(0, Commit::StoreAndActivate)).await?;
    match Activation::decode(answer.status) {
        // The image becomes active with the next reset in both cases.
        Activation::Done | Activation::ControllerReset => {
            controller.reset().await?;
            let after = controller.info().controller.map(|info| info.firmware).unwrap_or_default();
            tracing::warn!(
                controller = name,
                before = info.firmware,
                after,
                "the NVMe controller was reset to run its firmware"
            );
            Ok(format!("the controller '{name}' runs firmware '{after}', before '{}'", info.firmware))
        }
        Activation::SubsystemReset => {
            Ok("the firmware is stored; a reset of the NVM subsystem activates it".into())
        }
        Activation::ConventionalReset => {
            Ok("the firmware is stored; a power cycle of the drive activates it".into())
        }
        Activation::Failed(status) => {
            Err(Error::errno(Errno::IO, format!("the controller '{name}' refuses the firmware: {status}")))
        }
    }
}

fn read_image(path: &std::path::Path) -> Result<Vec<u8>, Error> {
    let failed = |error: std::io::Error| {
        Error::errno(
            Errno::from_io_error(&error).unwrap_or(Errno::IO),
            format!("{}: {error}", path.display()),
        )
    };
    let about = std::fs::metadata(path).map_err(failed)?;
    if !about.is_file() || about.len() > IMAGE_MAX {
        let detail = format!("{}: a firmware image is a file of at most {IMAGE_MAX} bytes", path.display());
        return Err(Error::invalid(detail));
    }
    std::fs::read(path).map_err(failed)
}

/// Base64 with the characters of URLs. Clients pad the text, or do not.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &URL_SAFE,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true),
);

/// Parameters of `bdev_nvme_send_cmd`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SendCmd {
    /// Name of the controller.
    name: String,
    /// `admin`: I/O commands are refused, since disks carry out I/O.
    cmd_type: CommandType,
    /// Direction of the data.
    data_direction: Direction,
    /// The command, 64 bytes in base64 with the characters of URLs. Its CID and data pointers are ignored.
    cmdbuf: String,
    /// The data for the controller, in base64.
    data: Option<String>,
    /// Metadata, which is not supported.
    metadata: Option<String>,
    /// Bytes that the controller writes.
    #[serde(default)]
    data_len: u32,
    /// Bytes of metadata, which is not supported.
    #[serde(default)]
    metadata_len: u32,
    /// Milliseconds to wait for the completion. Default: as long as the driver waits.
    #[serde(default)]
    timeout_ms: u32,
}

/// Kind of an NVMe command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "NvmeCommandType")]
pub(super) enum CommandType {
    Admin,
    Io,
}

/// From the host to the controller, or back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "NvmeDirection")]
enum Direction {
    H2c,
    C2h,
}

/// Result of `bdev_nvme_send_cmd`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "NvmeCompletion")]
struct Sent {
    /// The completion, 16 bytes in base64 with the characters of URLs. Its queue and CID are 0.
    cpl: String,
    /// What the controller wrote, in base64.
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<String>,
}

async fn send_cmd(control: &Control, p: SendCmd) -> Result<Sent, Error> {
    let remote = control.nvme.remotes.find(&p.name).ok();
    let drive = if remote.is_none() { Some(find(control, &p.name)?) } else { None };
    if p.cmd_type == CommandType::Io {
        let detail =
            "I/O commands are not sent: they would pass by the disks, their limits and their reservations";
        return Err(Error::errno(Errno::NOTSUP, detail));
    }
    if p.metadata_len > 0 || p.metadata.is_some_and(|metadata| !metadata.is_empty()) {
        return Err(Error::errno(Errno::NOTSUP, "metadata is not supported"));
    }
    let command = command(&p.cmdbuf, p.data_direction, p.data.as_deref(), p.data_len)?;
    if remote.is_some() {
        check_for_remote(&command)?;
    }
    if command.patience == Patience::Long {
        let opcode = command.entry.opcode();
        tracing::warn!(controller = p.name, opcode, "a client sends a command that changes the NVMe drive");
    }
    let answer = async {
        match (remote, drive) {
            (Some(remote), _) => Ok::<_, Error>(remote.admin(command).await?),
            (None, Some(drive)) => Ok(drive.admin(command).await?),
            (None, None) => Err(Error::no_device(super::KIND, &p.name)),
        }
    };
    let answer = match p.timeout_ms {
        0 => answer.await?,
        ms => tokio::time::timeout(Duration::from_millis(ms.into()), answer).await.map_err(|_| {
            Error::errno(
                Errno::TIMEDOUT,
                "the command was not completed in time; the controller may still execute it",
            )
        })??,
    };
    let mut cpl = [0; 16];
    cpl[..4].copy_from_slice(&answer.result.to_le_bytes());
    cpl[14..].copy_from_slice(&(answer.status.bits() << 1).to_le_bytes());
    let data = (p.data_direction == Direction::C2h).then(|| BASE64.encode(answer.data));
    Ok(Sent { cpl: BASE64.encode(cpl), data })
}

/// Refuses a command that does not only read, or asks for more or less than it reads: a target has other users, and a connection
/// ends where the data is not what was asked for.
fn check_for_remote(command: &admin::Command) -> Result<(), Error> {
    let opcode = command.entry.opcode();
    let cdw = [10, 11, 12, 13, 14, 15].map(|n| command.entry.cdw(n));
    if policy::verdict(opcode, cdw[0]) != Verdict::Read {
        let detail = "only commands that read are sent to a controller of another host";
        return Err(Error::errno(Errno::PERM, detail));
    }
    let len = match command.data {
        Data::FromController(len) => len as u64,
        Data::None => 0,
        Data::ToController(_) => return Err(Error::invalid("the command has no data for the controller")),
    };
    let transfer = match opcode {
        opcode::admin::IDENTIFY => 4096,
        _ => policy::transfer(opcode, &cdw),
    };
    if len != transfer {
        return Err(Error::invalid(format!("the command transfers {transfer} bytes, not {len}")));
    }
    Ok(())
}

/// The command of a client.
fn command(
    cmdbuf: &str,
    direction: Direction,
    data: Option<&str>,
    len: u32,
) -> Result<admin::Command, Error> {
    let decode = |what: &str, text: &str| {
        BASE64.decode(text).map_err(|error| Error::invalid(format!("`{what}` is not base64: {error}")))
    };
    let bytes = decode("cmdbuf", cmdbuf)?;
    let Ok(bytes) = <[u8; 64]>::try_from(bytes) else {
        return Err(Error::invalid("`cmdbuf` must have 64 bytes"));
    };
    let word =
        |n: usize| u32::from_le_bytes([bytes[4 * n], bytes[4 * n + 1], bytes[4 * n + 2], bytes[4 * n + 3]]);
    let entry = SubmissionEntry::new(bytes[0], word(1))
        .with_cdw10_11(word(10), word(11))
        .with_cdw12_13(word(12), word(13))
        .with_cdw14_15(word(14), word(15));
    let data = match (direction, data) {
        (Direction::C2h, Some(_)) => {
            return Err(Error::invalid("`data` goes to the controller: `data_direction` must be h2c"));
        }
        (Direction::H2c, _) if len > 0 => {
            return Err(Error::invalid(
                "`data_len` is for data of the controller: `data_direction` must be c2h",
            ));
        }
        (Direction::H2c, Some(data)) => match decode("data", data)? {
            data if data.is_empty() => Data::None,
            data => Data::ToController(data),
        },
        (Direction::C2h, None) if len > 0 => Data::FromController(len as usize),
        (_, None) => Data::None,
    };
    let patience = match policy::verdict(bytes[0], word(10)) {
        Verdict::Change => Patience::Long,
        Verdict::Read | Verdict::Never => Patience::Normal,
    };
    let len = match &data {
        Data::None => 0,
        Data::FromController(len) => *len,
        Data::ToController(data) => data.len(),
    };
    if len > admin::DATA_MAX {
        let detail = format!("an admin command may have at most {} bytes of data", admin::DATA_MAX);
        return Err(Error::invalid(detail));
    }
    Ok(admin::Command { entry, data, patience })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn built(direction: Direction, data: Option<&str>, len: u32) -> Result<admin::Command, Error> {
        let mut bytes = [0xff; 64];
        bytes[..4].copy_from_slice(&[0x06, 0, 7, 7]);
        bytes[4..8].copy_from_slice(&1_u32.to_le_bytes());
        (10..16_u32).for_each(|n| bytes[4 * n as usize..][..4].copy_from_slice(&n.to_le_bytes()));
        command(&BASE64.encode(bytes), direction, data, len)
    }

    #[test]
    fn a_command_keeps_its_fields_and_neither_cid_nor_pointers() {
        let command = built(Direction::C2h, None, 4096).unwrap();
        let expected =
            SubmissionEntry::new(6, 1).with_cdw10_11(10, 11).with_cdw12_13(12, 13).with_cdw14_15(14, 15);
        assert_eq!((command.entry, command.data), (expected, Data::FromController(4096)));
        assert_eq!(built(Direction::H2c, Some("AQI"), 0).unwrap().data, Data::ToController(vec![1, 2]));
        assert_eq!(built(Direction::H2c, Some("AQI="), 0).unwrap().data, Data::ToController(vec![1, 2]));
        assert_eq!(built(Direction::H2c, None, 0).unwrap().data, Data::None);
    }

    #[test]
    fn wrong_data_is_refused() {
        for (direction, data, len) in [
            (Direction::C2h, Some("AQI"), 0),
            (Direction::H2c, None, 1),
            (Direction::H2c, Some("?"), 0),
            (Direction::C2h, None, u32::MAX),
        ] {
            assert_eq!(built(direction, data, len).unwrap_err().code(), -22);
        }
        for cmdbuf in ["", "AAAA", "not base64"] {
            assert_eq!(command(cmdbuf, Direction::C2h, None, 0).unwrap_err().code(), -22);
        }
    }
}
