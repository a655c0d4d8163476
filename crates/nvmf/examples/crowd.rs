//! Many hosts of NVMe/TCP that do nothing: `crowd PORT NQN HOSTS QUEUES` connects to 127.0.0.1, each host from an address of its
//! own, with an admin queue and QUEUES I/O queues; says how many connections there are, and keeps them until its input ends.

use anyhow::{Context, Result, bail, ensure};
use aryk_nvme::spec::register::{CC, Cc};
use aryk_nvme_fabrics::command::{Command, Connect};
use aryk_nvme_fabrics::connect::{ANY_CONTROLLER, ConnectData};
use aryk_nvme_fabrics::property::Access;
use aryk_nvme_fabrics::sgl::Sgl;
use aryk_nvme_fabrics::tcp::{Event, Format, HEADER_MAX, Header, IcReq, Limits, Parser, Side};
use rustix::net::{self, AddressFamily, SocketType};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

/// Entries of a queue, which is what Linux asks for.
const ENTRIES: u16 = 128;
const PATIENCE: Duration = Duration::from_secs(60);

/// A connection.
struct Queue {
    socket: TcpStream,
    parser: Parser,
    format: Format,
}

impl Queue {
    fn open(from: Ipv4Addr, port: u16) -> Result<Self> {
        let socket = net::socket(AddressFamily::INET, SocketType::STREAM, None)?;
        net::bind(&socket, &SocketAddr::from((from, 0)))?;
        net::connect(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, port)))?;
        let socket = TcpStream::from(socket);
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        let parser = Parser::new(Side::Host, Limits { capsule_data_max: 0, data_max: 4096 });
        let mut queue = Self { socket, parser, format: Format::default() };
        let request = IcReq { alignment: 0, header_digest: false, data_digest: false, max_r2t: 0 };
        queue.send(&Header::IcReq(request), &[])?;
        let Header::IcResp(answer) = queue.receive()? else { bail!("the target does not begin with ICResp") };
        queue.parser.establish(request.c2h_format(&answer));
        queue.format = answer.h2c_format();
        Ok(queue)
    }

    fn send(&mut self, header: &Header, data: &[u8]) -> Result<()> {
        let mut bytes = [0; HEADER_MAX];
        let len = header.encode(&self.format, &mut bytes);
        self.socket.write_all(&[&bytes[..len], data].concat())?;
        Ok(())
    }

    fn receive(&mut self) -> Result<Header> {
        loop {
            let mut byte = [0];
            self.socket.read_exact(&mut byte)?;
            let (mut input, mut received) = (&byte[..], None);
            while let Some(event) = self.parser.next(&mut input).ok().context("a PDU that is none")? {
                if let Event::Header(header) = event {
                    received = Some(header);
                }
            }
            if let Some(header) = received {
                return Ok(header);
            }
        }
    }

    /// Runs a command, and returns its result.
    fn run(&mut self, command: &Command, data: &[u8]) -> Result<u64> {
        let len = data.len() as u32;
        let sgl = if len > 0 { Sgl::InCapsule { offset: 0, len } } else { Sgl::Transport { len } };
        let entry = command.encode().with_sgl(sgl.encode());
        self.send(&Header::Command { entry, data_len: len }, data)?;
        let Header::Response(completion) = self.receive()? else {
            bail!("a command is answered by its completion")
        };
        ensure!(completion.status().is_success(), "{command:?}: {:?}", completion.status());
        Ok(completion.result_64())
    }

    fn connect(&mut self, nqn: &str, host: u8, qid: u16, controller_id: u16) -> Result<u16> {
        let connect = Connect {
            record_format: 0,
            qid,
            sqsize: ENTRIES - 1,
            disables_flow_control: false,
            keep_alive_ms: 0,
        };
        let data = ConnectData {
            host_id: [host; 16],
            controller_id,
            subsystem: nqn.parse()?,
            host: format!("nqn.2016-06.io.aryk:crowd{host}").parse()?,
        };
        Ok(self.run(&Command::Connect(connect), &data.encode())? as u16)
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [port, nqn, hosts, queues] = &arguments[..] else { bail!("usage: crowd PORT NQN HOSTS QUEUES") };
    let (port, hosts, queues) = (port.parse()?, hosts.parse::<u8>()?, queues.parse::<u16>()?);
    let mut all = Vec::new();
    for host in 1..=hosts {
        let from = Ipv4Addr::new(127, 0, 1, host);
        let mut admin = Queue::open(from, port)?;
        let id = admin.connect(nqn, host, 0, ANY_CONTROLLER)?;
        let value = Cc::enabled(4096, false).0.into();
        admin.run(&Command::PropertySet { access: Access::four(CC), value }, &[])?;
        all.push(admin);
        for qid in 1..=queues {
            let mut queue = Queue::open(from, port)?;
            queue.connect(nqn, host, qid, id).with_context(|| format!("connection {}", all.len() + 1))?;
            all.push(queue);
        }
    }
    println!("{}", all.len());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
