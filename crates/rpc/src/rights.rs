//! Rights of clients: the kernel's credentials of the peer of a UNIX socket are matched against rules. Control context.
//!
//! Without rules, every client that can open the socket has full rights. With rules, root and the daemon's own user still have
//! full rights, since they could obtain them in other ways; other clients have the rights of the first rule that matches, and
//! none if no rule matches.

use crate::Error;
use nix::unistd::{Group, User};
use rustix::io::Errno;
use rustix::process::{geteuid, getuid};
use std::collections::BTreeSet;
use std::str::FromStr;
use tokio::net::unix::UCred;

/// Rights of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rights {
    /// Call all methods.
    Full,
    /// Call only methods that change nothing.
    ReadOnly,
}

impl Rights {
    /// Checks that `what`, which changes something, may be called.
    ///
    /// # Errors
    /// `EACCES`.
    pub(crate) fn may_change(self, what: &str) -> Result<(), Error> {
        match self {
            Self::Full => Ok(()),
            Self::ReadOnly => {
                let detail = format!("{what} changes something, and the rule (--rpc-allow) is read-only");
                Err(Error::errno(Errno::ACCESS, detail))
            }
        }
    }
}

/// The clients that a rule matches.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Who {
    Anybody,
    User(u32),
    /// Processes of that group, and users who were its members when the rule was parsed.
    Group {
        gid: u32,
        members: BTreeSet<u32>,
    },
}

/// `uid:1000=read-only`, `gid:disk=full`, `any=read-only`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    who: Who,
    rights: Rights,
}

/// Why a text is not a valid rule.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum RuleError {
    /// The text has another form.
    #[error(
        "'{0}' is not a rule: uid:USER=RIGHTS, gid:GROUP=RIGHTS or any=RIGHTS, where RIGHTS is full or read-only"
    )]
    Form(String),
    /// The system has no user or group with that name.
    #[error("there is no {kind} '{name}'")]
    UnknownName {
        /// `user` or `group`.
        kind: &'static str,
        /// The name in the text.
        name: String,
    },
}

impl FromStr for Rule {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        let form = || RuleError::Form(text.to_owned());
        let (who, rights) = text.split_once('=').ok_or_else(form)?;
        let rights = match rights {
            "full" => Rights::Full,
            "read-only" => Rights::ReadOnly,
            _ => return Err(form()),
        };
        let who = match who.split_once(':') {
            None if who == "any" => Who::Anybody,
            Some(("uid", user)) if !user.is_empty() => Who::User(uid(user)?),
            Some(("gid", group)) if !group.is_empty() => Who::group(group)?,
            _ => return Err(form()),
        };
        Ok(Self { who, rights })
    }
}

/// The user ID for a number or a name.
fn uid(text: &str) -> Result<u32, RuleError> {
    let by_name = || User::from_name(text).ok().flatten().map(|user| user.uid.as_raw());
    let unknown = || RuleError::UnknownName { kind: "user", name: text.to_owned() };
    text.parse().ok().or_else(by_name).ok_or_else(unknown)
}

/// The group ID for a number or a name.
///
/// # Errors
/// [`RuleError::UnknownName`].
pub fn gid(text: &str) -> Result<u32, RuleError> {
    let by_name = || Group::from_name(text).ok().flatten().map(|group| group.gid.as_raw());
    let unknown = || RuleError::UnknownName { kind: "group", name: text.to_owned() };
    text.parse().ok().or_else(by_name).ok_or_else(unknown)
}

impl Who {
    /// Members are looked up here, and not when a client connects: users from a network directory may take long.
    fn group(text: &str) -> Result<Self, RuleError> {
        let gid = gid(text)?;
        let group = Group::from_gid(gid.into()).ok().flatten();
        let users = group.into_iter().flat_map(|group| group.mem);
        let members = users.filter_map(|user| User::from_name(&user).ok().flatten());
        Ok(Self::Group { gid, members: members.map(|user| user.uid.as_raw()).collect() })
    }

    fn fits(&self, peer: Peer) -> bool {
        match self {
            Self::Anybody => true,
            Self::User(uid) => *uid == peer.uid,
            Self::Group { gid, members } => *gid == peer.gid || members.contains(&peer.uid),
        }
    }
}

/// The peer of a connection, as the kernel recorded it at connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Peer {
    uid: u32,
    gid: u32,
}

impl From<UCred> for Peer {
    fn from(credentials: UCred) -> Self {
        Self { uid: credentials.uid(), gid: credentials.gid() }
    }
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "uid {}, gid {}", self.uid, self.gid)
    }
}

/// Rules, in order of priority.
#[derive(Debug, Clone, Default)]
pub struct Rules(Vec<Rule>);

impl Rules {
    /// No rules: all clients have full rights.
    pub const fn none() -> Self {
        Self(Vec::new())
    }

    /// Rules, the first with the highest priority.
    pub const fn new(rules: Vec<Rule>) -> Self {
        Self(rules)
    }

    /// The rights of `peer`.
    ///
    /// # Errors
    /// `EACCES`: `peer` has no rights.
    pub(crate) fn rights(&self, peer: Peer) -> Result<Rights, Error> {
        let is_us = [0, getuid().as_raw(), geteuid().as_raw()].contains(&peer.uid);
        if self.0.is_empty() || is_us {
            return Ok(Rights::Full);
        }
        let rule = self.0.iter().find(|rule| rule.who.fits(peer));
        rule.map(|rule| rule.rights).ok_or_else(|| {
            Error::errno(Errno::ACCESS, format!("no rule (--rpc-allow) gives {peer} any rights"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(texts: &[&str]) -> Rules {
        Rules::new(texts.iter().map(|text| text.parse().unwrap()).collect())
    }

    /// The rights of a client that is neither root nor the daemon's user.
    fn rights(rules: &Rules, uid: u32, gid: u32) -> Option<Rights> {
        rules.rights(Peer { uid, gid }).ok()
    }

    const STRANGER: u32 = 4_000_000_001;

    #[test]
    fn the_first_matching_rule_counts() {
        let all = rules(&["uid:4000000001=read-only", "gid:4000000002=full"]);
        assert_eq!(rights(&all, STRANGER, STRANGER + 1), Some(Rights::ReadOnly));
        assert_eq!(rights(&all, STRANGER + 9, STRANGER + 1), Some(Rights::Full));
        assert_eq!(rights(&all, STRANGER + 9, STRANGER), None);
        assert_eq!(rights(&all, 0, 0), Some(Rights::Full));
        assert_eq!(rights(&all, getuid().as_raw(), STRANGER), Some(Rights::Full));
        assert_eq!(rights(&rules(&["any=read-only"]), STRANGER, STRANGER), Some(Rights::ReadOnly));
        assert_eq!(rights(&Rules::none(), STRANGER, STRANGER), Some(Rights::Full));
        let error = all.rights(Peer { uid: STRANGER + 9, gid: 7 }).unwrap_err();
        assert_eq!((error.code(), error.message().as_str()), (-13, "Permission denied"));
    }

    #[test]
    fn group_rules_match_members() {
        let who = Who::Group { gid: 5, members: [STRANGER].into() };
        assert!(who.fits(Peer { uid: STRANGER, gid: 1 }) && who.fits(Peer { uid: 1, gid: 5 }));
        assert!(!who.fits(Peer { uid: 5, gid: STRANGER }));
    }

    #[test]
    fn names_and_numbers() {
        assert_eq!("uid:root=full".parse::<Rule>(), "uid:0=full".parse::<Rule>());
        assert_eq!("gid:root=read-only".parse::<Rule>(), "gid:0=read-only".parse::<Rule>());
        for wrong in ["", "root=full", "uid:=full", "uid:0", "uid:0=some", "pid:1=full", "uid:0=full "] {
            assert_eq!(wrong.parse::<Rule>(), Err(RuleError::Form(wrong.into())));
        }
        let unknown = RuleError::UnknownName { kind: "user", name: "no such user".into() };
        assert_eq!("uid:no such user=full".parse::<Rule>(), Err(unknown));
        assert!("gid:-1=full".parse::<Rule>().is_err());
    }
}
