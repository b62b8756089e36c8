//! A headless Chromium, driven over the pipe of its DevTools protocol: JSON that ends with a zero.

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

/// A browser with one page, until it is dropped.
pub(crate) struct Browser {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    session: Option<String>,
    calls: u64,
    /// Exceptions in the page, and violations of its content policy.
    complaints: Vec<Value>,
    _profile: TempDir,
}

impl Browser {
    /// Opens an address in the browser that `CHROMIUM` names, `chromium` by default.
    pub(crate) fn open(url: &str) -> Self {
        let chromium = env::var("CHROMIUM").unwrap_or_else(|_| "chromium".to_owned());
        let profile = TempDir::new().expect("a directory");
        // The browser's commands use descriptors 3 and 4, which only a shell can set up.
        let laid = r#"exec "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1"#;
        let mut child = Command::new("sh")
            .args(["-c", laid, "sh", &chromium])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .args(["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic"])
            .args(["--no-first-run", "--disable-background-networking", "--disable-sync"])
            .args(["--disable-component-update", "--remote-debugging-pipe", "about:blank"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a shell");
        let to = child.stdin.take().expect("piped");
        let from = BufReader::new(child.stdout.take().expect("piped"));
        let mut browser = Self {
            child,
            to,
            from,
            session: None,
            calls: 0,
            complaints: Vec::new(),
            _profile: profile,
        };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let attached = json!({"targetId": target["targetId"], "flatten": true});
        let attached = browser.call("Target.attachToTarget", attached);
        browser.session = attached["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser.call("Page.navigate", json!({"url": url}));
        browser.wait("document.readyState === 'complete'");
        browser
    }

    pub(crate) fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.calls += 1;
        let mut message = json!({"id": self.calls, "method": method, "params": parameters});
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        write!(self.to, "{message}\0").and_then(|()| self.to.flush()).expect("it listens");
        loop {
            let mut text = Vec::new();
            self.from.read_until(0, &mut text).expect("it speaks");
            assert_eq!(text.pop(), Some(0), "the browser has ended, before {method} was answered");
            let mut message: Value = serde_json::from_slice(&text).expect("JSON");
            if message["id"] == json!(self.calls) {
                assert_eq!(message.get("error"), None, "{method}");
                return message["result"].take();
            }
            let of_policy = message["params"]["entry"]["source"] == "security";
            if message["method"] == "Runtime.exceptionThrown" || of_policy {
                self.complaints.push(message["params"].take());
            }
        }
    }

    /// The value of an expression in the page.
    pub(crate) fn value(&mut self, expression: &str) -> Value {
        let asked = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let mut told = self.call("Runtime.evaluate", asked);
        assert_eq!(told.get("exceptionDetails"), None, "{expression}");
        told["result"]["value"].take()
    }

    pub(crate) fn text(&mut self, selector: &str) -> String {
        let told = self.value(&format!("document.querySelector({selector:?}).textContent"));
        told.as_str().expect("text").trim().to_owned()
    }

    /// Until an expression is true, which may take two windows and a bit.
    pub(crate) fn wait(&mut self, expression: &str) {
        let since = Instant::now();
        while self.value(expression) != json!(true) {
            if since.elapsed() > Duration::from_secs(45) {
                let shown = self.value("document.body.innerText");
                panic!("in vain for {expression}\n{:?}\n{shown:#}", self.complaints);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    pub(crate) fn click(&mut self, selector: &str) {
        self.value(&format!("document.querySelector({selector:?}).click()"));
    }

    /// Presses a key, as a user does.
    pub(crate) fn press(&mut self, key: &str, code: u32, text: &str) {
        for kind in ["keyDown", "keyUp"] {
            let key = json!({"type": kind, "key": key, "code": key, "text": text,
                "windowsVirtualKeyCode": code});
            self.call("Input.dispatchKeyEvent", key);
        }
    }

    pub(crate) fn complaints(&self) -> &[Value] {
        &self.complaints
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Its own processes follow it.
        let _killed = self.child.kill();
        let _waited = self.child.wait();
    }
}
