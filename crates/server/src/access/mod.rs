//! Who may do what: keys, tenants, and what needs the admin's.
