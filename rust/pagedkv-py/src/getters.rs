//! Properties that show what an object of the core has.

/// Read-only properties of a class around an object of the core, which is its field `place`: each is the object's field of
/// the same name, or what is said of the object behind `=`.
macro_rules! getters {
    ($class:ident.$place:tt { $($(#[$doc:meta])* $name:ident: $kind:ty $(= |$object:ident| $value:expr)?;)* }) => {
        #[pymethods]
        impl $class {
            $($(#[$doc])*
            #[getter]
            fn $name(&self) -> $kind {
                getters!(@read self.$place, $name $(, |$object| $value)?)
            })*
        }
    };
    (@read $inner:expr, $name:ident) => { $inner.$name };
    (@read $inner:expr, $name:ident, |$object:ident| $value:expr) => {{
        let $object = &$inner;
        $value
    }};
}
pub(crate) use getters;
