//! A server between clients and Redis that reads their commands: a proxy that knows few of them or
//! has several servers, or a server that lacks something.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

/// The fate of a command.
pub enum Fate {
    /// The server of this port answers.
    To(u16),
    /// Answers to this command in place of the client's.
    Instead(u16, Command),
    /// This is the answer, without the end of its last line.
    Answer(String),
    /// The connection ends without an answer.
    Close,
    /// The server of this port executes it, and the connection ends without the answer.
    Lose(u16),
    /// The same, and the connection ends inside of the answer.
    Break(u16),
}

/// A command: its name in upper case, then its arguments.
pub type Command = Vec<Vec<u8>>;

/// Starts a gateway, and returns its port. `fate` decides on each command. The gateway's threads
/// end with the process.
pub fn gateway(fate: impl Fn(&Command) -> Fate + Send + Sync + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let fate = Arc::new(fate);
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let fate = Arc::clone(&fate);
            thread::spawn(move || {
                let _ = serve(&client, &*fate);
                let _ = client.shutdown(Shutdown::Both);
            });
        }
    });
    port
}

/// A text among the arguments of a command.
pub fn contains(command: &Command, text: &str) -> bool {
    command.iter().any(|arg| arg.windows(text.len()).any(|at| at == text.as_bytes()))
}

fn serve(client: &TcpStream, fate: &(impl Fn(&Command) -> Fate + ?Sized)) -> io::Result<()> {
    client.set_nodelay(true)?;
    let (mut commands, mut client) = (BufReader::new(client), client);
    let mut servers: Vec<(u16, BufReader<TcpStream>)> = Vec::new();
    loop {
        let (raw, command) = read_command(&mut commands)?;
        let fate = fate(&command);
        let (loses, breaks) = (matches!(fate, Fate::Lose(_)), matches!(fate, Fate::Break(_)));
        let raw = if let Fate::Instead(_, other) = &fate { encode(other) } else { raw };
        match fate {
            Fate::Close => return Ok(()),
            Fate::Answer(answer) => client.write_all(format!("{answer}\r\n").as_bytes())?,
            Fate::To(port) | Fate::Instead(port, _) | Fate::Lose(port) | Fate::Break(port) => {
                if !servers.iter().any(|(of, _)| *of == port) {
                    let server = TcpStream::connect(("127.0.0.1", port))?;
                    server.set_nodelay(true)?;
                    servers.push((port, BufReader::new(server)));
                }
                let server = servers.iter_mut().find(|(of, _)| *of == port);
                let (_, server) = server.expect("it is connected");
                server.get_mut().write_all(&raw)?;
                let mut answer = Vec::new();
                read_value(server, &mut answer)?;
                if breaks {
                    client.write_all(&answer[..answer.len() - 2])?;
                }
                if loses || breaks {
                    return Ok(());
                }
                client.write_all(&answer)?;
            }
        }
    }
}

fn encode(command: &Command) -> Vec<u8> {
    let mut raw = format!("*{}\r\n", command.len()).into_bytes();
    for arg in command {
        raw.extend_from_slice(format!("${}\r\n", arg.len()).as_bytes());
        raw.extend_from_slice(arg);
        raw.extend_from_slice(b"\r\n");
    }
    raw
}

fn read_command(from: &mut impl BufRead) -> io::Result<(Vec<u8>, Command)> {
    let mut raw = Vec::new();
    let count = read_header(from, &mut raw)?;
    let mut command = Command::new();
    for _ in 0..count {
        let start = raw.len();
        read_value(from, &mut raw)?;
        let text = raw[start..].splitn(2, |byte| *byte == b'\n').nth(1).unwrap_or_default();
        command.push(text[..text.len().saturating_sub(2)].to_vec());
    }
    if let Some(name) = command.first_mut() {
        name.make_ascii_uppercase();
    }
    Ok((raw, command))
}

/// Reads a line, and returns its number, if it has one.
fn read_header(from: &mut impl BufRead, raw: &mut Vec<u8>) -> io::Result<i64> {
    let start = raw.len();
    if from.read_until(b'\n', raw)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let line = str::from_utf8(&raw[start + 1..]).unwrap_or_default();
    Ok(line.trim().parse().unwrap_or(0))
}

/// Reads a value of version 2 of the protocol.
fn read_value(from: &mut impl BufRead, raw: &mut Vec<u8>) -> io::Result<()> {
    let start = raw.len();
    let number = read_header(from, raw)?;
    match raw[start] {
        b'$' if number >= 0 => {
            let end = raw.len() + number as usize + 2;
            from.take(end as u64 - raw.len() as u64).read_to_end(raw)?;
            if raw.len() < end {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        b'*' => {
            for _ in 0..number {
                read_value(from, raw)?;
            }
        }
        _ => {}
    }
    Ok(())
}
