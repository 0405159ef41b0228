// The structures of XLA's FFI that a handler reads, in the layout of its stable C interface,
// xla/ffi/api/c_api.h: what is declared here has had this layout in all versions 0.x.
//
// Copyright 2023 The OpenXLA Authors, Apache License 2.0 (http://www.apache.org/licenses/LICENSE-2.0);
// shortened and renamed.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace xla {

enum {
    METADATA = 1,
    EXECUTE = 3,
    INVALID_ARGUMENT = 3,
    RESOURCE_EXHAUSTED = 8,
    ABORTED = 10,
    ATTRIBUTE_ARRAY = 1,
    S64 = 5
};

struct Error;

struct Extension {
    size_t size;
    int32_t type;
    Extension* next;
};

struct Version {
    size_t size;
    Extension* extension;
    int32_t major, minor;
};

struct ErrorArguments {
    size_t size;
    Extension* extension;
    const char* message;
    int32_t code;
};

struct Api {
    size_t size;
    Extension* extension;
    Version version;
    const void* internal;
    Error* (*create_error)(ErrorArguments*);
};

struct Metadata {
    size_t size;
    Version version;
    uint32_t traits;
};

struct MetadataExtension {
    Extension base;
    Metadata* metadata;
};

struct Buffer {
    size_t size;
    Extension* extension;
    int32_t dtype;
    void* data;
    int64_t rank;
    int64_t* shape;
};

struct Buffers {
    size_t size;
    Extension* extension;
    int64_t count;
    int32_t* types;
    Buffer** buffers;
};

struct Text {
    const char* data;
    size_t size;
};

struct Array {
    int32_t dtype;
    size_t size;
    void* data;
};

struct Attributes {
    size_t size;
    Extension* extension;
    int64_t count;
    int32_t* types;
    Text** names;
    void** values;
};

struct Frame {
    size_t size;
    Extension* extension;
    const Api* api;
    void* context;
    int32_t stage;
    Buffers arguments, results;
    Attributes attributes;
};

}  // namespace xla
