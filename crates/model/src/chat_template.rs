//! chat_template
