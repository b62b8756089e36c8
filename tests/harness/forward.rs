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
