//! Status codes of Fabrics commands. NVMe 2.0 §3.3.3.2.1.2 (Fabrics). Any context.
//!
//! They share SCT 1 and the numbers of status codes of the NVM command set, so that the command tells which of both a code is.

use aryk_nvme::spec::status::Code;

/// Connect: the record format is not supported.
pub const INCOMPATIBLE_FORMAT: Code = Code(0x180);
/// Connect: the controller or queue is in use.
pub const CONTROLLER_BUSY: Code = Code(0x181);
/// Connect: a parameter is wrong; the result names it ([`crate::connect::InvalidParameter`]).
pub const INVALID_PARAMETERS: Code = Code(0x182);
/// Connect: the subsystem is not here any more, discover it again.
pub const RESTART_DISCOVERY: Code = Code(0x183);
/// Connect: the subsystem does not allow this host.
pub const INVALID_HOST: Code = Code(0x184);
/// The queue must be authenticated before it takes this command.
pub const AUTHENTICATION_REQUIRED: Code = Code(0x191);

/// The name of a code in the completion of a Fabrics command.
pub const fn name(code: Code) -> &'static str {
    match code {
        INCOMPATIBLE_FORMAT => "Connect Incompatible Format",
        CONTROLLER_BUSY => "Connect Controller Busy",
        INVALID_PARAMETERS => "Connect Invalid Parameters",
        RESTART_DISCOVERY => "Connect Restart Discovery",
        INVALID_HOST => "Connect Invalid Host",
        AUTHENTICATION_REQUIRED => "Authentication Required",
        code => code.name(),
    }
}
