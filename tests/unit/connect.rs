use super::*;

#[test]
fn each_further_attempt_takes_the_next_address_of_a_name() {
    let all = ["192.0.2.1:6379", "192.0.2.2:6379"].map(|text| text.parse().expect("an address"));
    let taken = (1..=4).map(|attempt| Nth(attempt).of(&all));
    assert!(taken.eq([1, 0, 1, 0].map(|place| Some(all[place]))));
    assert_eq!(Nth(1).of(&[]), None);
}

#[cfg(not(feature = "tls"))]
#[test]
fn an_address_with_tls_names_the_feature_that_it_needs() {
    let error = crate::RedisStore::new("rediss://localhost/").expect_err("the feature is off");
    assert_eq!(error.to_string(), "rediss:// needs the feature tls");
}
