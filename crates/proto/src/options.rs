//! Methods that set one field each of a struct of options.

/// Defines `with_…` methods: the structs are `#[non_exhaustive]`, so that a new option breaks no
/// program, and programs start from `Default`. Setters of optional fields take the value, `Some`
/// of it, or `None`.
#[doc(hidden)] // for warpwire, whose options follow the same pattern
#[macro_export]
macro_rules! setters {
    (
        $name:ident { $($with:ident => $field:ident: $kind:ty,)* }
        $(optional { $($with_some:ident => $some:ident: $some_kind:ty,)* })?
    ) => {
        impl $name {
            $(
                #[doc = concat!("Sets [`", stringify!($field), "`](Self::", stringify!($field), ").")]
                #[must_use]
                pub fn $with(mut self, $field: $kind) -> Self {
                    self.$field = $field;
                    self
                }
            )*
            $($(
                #[doc = concat!("Sets [`", stringify!($some), "`](Self::", stringify!($some), ").")]
                #[must_use]
                pub fn $with_some(mut self, $some: impl Into<Option<$some_kind>>) -> Self {
                    self.$some = $some.into();
                    self
                }
            )*)?
        }
    };
}
