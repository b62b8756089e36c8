//! Stores that pass calls on to another one.

/// The operations of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    Charge,
    Adjust,
    Reset,
}

/// Implements `Store` by a method `forward(&self, operation, ask)`, which calls `ask` with a store in
/// memory: later, somewhere else, or not at all.
#[macro_export]
macro_rules! forward_to_memory {
    ($store:ty, { $($more:item)* }) => {
        impl tower_fixed_window::Store for $store {
            fn charge(
                &self,
                charge: tower_fixed_window::store::Charge<'_>,
            ) -> tower_fixed_window::store::Reply<tower_fixed_window::Decision> {
                let charge = charge.to_owned();
                self.forward($crate::Operation::Charge, move |memory| {
                    memory.charge(charge.as_charge())
                })
            }

            fn adjust(
                &self,
                adjust: tower_fixed_window::store::Adjust<'_>,
            ) -> tower_fixed_window::store::Reply<()> {
                let adjust = adjust.to_owned();
                self.forward($crate::Operation::Adjust, move |memory| {
                    memory.adjust(adjust.as_adjust())
                })
            }

            fn reset(
                &self,
                scope: &tower_fixed_window::store::Scope,
                key: &tower_fixed_window::Key,
            ) -> tower_fixed_window::store::Reply<()> {
                let (scope, key) = (scope.clone(), key.clone());
                self.forward($crate::Operation::Reset, move |memory| {
                    memory.reset(&scope, &key)
                })
            }

            $($more)*
        }
    };
}

/// Implements `Store` by a field that is a `Remote`, with two of its settings.
#[macro_export]
macro_rules! forward_to_remote {
    ($store:ty, $this:ident => $to:expr) => {
        // Some of these stores have no other field.
        #[allow(clippy::needless_update)]
        impl $store {
            #[allow(dead_code)]
            pub(crate) fn on_failure(self, policy: tower_fixed_window::OnStoreFailure) -> Self {
                Self { remote: self.remote.on_failure(policy), ..self }
            }

            #[allow(dead_code)]
            pub(crate) fn remember_refusals(self, time: std::time::Duration) -> Self {
                Self { remote: self.remote.remember_refusals(time), ..self }
            }
        }

        impl tower_fixed_window::Store for $store {
            fn charge(
                &$this,
                charge: tower_fixed_window::store::Charge<'_>,
            ) -> tower_fixed_window::store::Reply<tower_fixed_window::Decision> {
                $to.charge(charge)
            }

            fn charges_together(&$this) -> bool {
                $to.charges_together()
            }

            fn adjust(
                &$this,
                adjust: tower_fixed_window::store::Adjust<'_>,
            ) -> tower_fixed_window::store::Reply<()> {
                $to.adjust(adjust)
            }

            fn reset(
                &$this,
                scope: &tower_fixed_window::store::Scope,
                key: &tower_fixed_window::Key,
            ) -> tower_fixed_window::store::Reply<()> {
                $to.reset(scope, key)
            }

            fn is_shared(&$this) -> bool {
                $to.is_shared()
            }

            fn remote(&$this) -> Option<tower_fixed_window::store::Remote> {
                $to.remote()
            }

            fn now_ms(&$this) -> u64 {
                $to.now_ms()
            }
        }
    };
}
