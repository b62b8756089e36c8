//! Who asks: which clients, in which order.

/// How requests are spread over clients.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Keys {
    /// All from one.
    Hot,
    /// From as many, in an order that no cache can guess.
    Uniform(u32),
    /// From as many, the n-th of them 1/n as often as the first.
    Zipf(u32),
}

impl Keys {
    pub fn parse(text: &str) -> Self {
        let count = |digits: &str| digits.parse().expect("a number of keys");
        match text.split_once('-') {
            Some(("uniform", digits)) => Self::Uniform(count(digits)),
            Some(("zipf", digits)) => Self::Zipf(count(digits)),
            _ => Self::Hot,
        }
    }

    pub fn id(self) -> String {
        match self {
            Self::Hot => "hot".into(),
            Self::Uniform(count) => format!("uniform-{count}"),
            Self::Zipf(count) => format!("zipf-{count}"),
        }
    }

    /// For a table's heading.
    pub fn title(self) -> String {
        match self {
            Self::Hot => "one hot key".into(),
            Self::Uniform(count) => format!("{} keys", thousands(count)),
            Self::Zipf(count) => format!("{} keys by Zipf", thousands(count)),
        }
    }

    pub fn count(self) -> u32 {
        match self {
            Self::Hot => 1,
            Self::Uniform(count) | Self::Zipf(count) => count,
        }
    }

    /// Each client once.
    pub fn all(self) -> Vec<u32> {
        (0..self.count()).map(client).collect()
    }

    /// The clients of `n` requests, the same in each call.
    pub fn requests(self, n: usize) -> Vec<u32> {
        let mut random = random(7);
        match self {
            Self::Hot => vec![client(0); n],
            Self::Uniform(count) => {
                (0..n).map(|_| client((random() % u64::from(count)) as u32)).collect()
            }
            Self::Zipf(count) => {
                let mut sum = 0.0;
                let up_to: Vec<f64> = (1..=count)
                    .map(|rank| {
                        sum += 1.0 / f64::from(rank);
                        sum
                    })
                    .collect();
                (0..n)
                    .map(|_| {
                        let at = (random() >> 11) as f64 / (1_u64 << 53) as f64 * sum;
                        client(up_to.partition_point(|&up_to| up_to < at) as u32)
                    })
                    .collect()
            }
        }
    }
}

/// The address of the n-th client: another for each, spread over all addresses.
pub fn client(n: u32) -> u32 {
    (n + 1).wrapping_mul(0x9e37_79b1)
}

pub fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

pub fn thousands(count: u32) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
