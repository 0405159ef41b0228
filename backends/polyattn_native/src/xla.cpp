// Handlers of XLA's custom calls. Python makes the PolyattnCall and says where in it the addresses of
// XLA's buffers belong; the handlers know of no array by its name.
#include "interface.h"
#include "xla_ffi.h"

#include <cstring>

namespace {

typedef int (*Function)(const PolyattnCall*, void**);

xla::Error* error(const xla::Frame& frame, const char* message, int32_t code) {
    xla::ErrorArguments arguments = {sizeof(arguments), nullptr, message, code};
    return frame.api->create_error(&arguments);
}

struct Words {
    const int64_t* data = nullptr;
    int64_t count = 0;
};

Words words(const xla::Attributes& attributes, const char* name) {
    for (int64_t i = 0; i < attributes.count; ++i) {
        const xla::Text& text = *attributes.names[i];
        if (text.size != std::strlen(name) || std::memcmp(text.data, name, text.size)) continue;
        const xla::Array& array = *(const xla::Array*)attributes.values[i];
        if (attributes.types[i] != xla::ATTRIBUTE_ARRAY || array.dtype != xla::S64) return {};
        return {(const int64_t*)array.data, (int64_t)array.size};
    }
    return {};
}

// Whether XLA asks for the version of the handler: what is read here is in all versions 0.x.
bool answers(const xla::Frame& frame) {
    if (!frame.extension || frame.extension->type != xla::METADATA) return false;
    xla::Metadata& metadata = *((xla::MetadataExtension*)frame.extension)->metadata;
    const int32_t minor = frame.api->version.major == 0 ? frame.api->version.minor : 0;
    metadata.version = {sizeof(xla::Version), nullptr, 0, minor};
    metadata.traits = 0;
    return true;
}

bool put(PolyattnCall& call, int64_t place, const void* from, size_t bytes) {
    if (bytes > 16 || place < 0 || (size_t)place > sizeof(call) - bytes) return false;
    std::memcpy((char*)&call + place, from, bytes);
    return true;
}

// The attribute "call" is a PolyattnCall and then tables of offsets. "places" are the bytes in it at
// which the addresses of arguments and results belong, or, where the high half is not 0, so many bytes
// of their numbers. "tables" are pairs of such a place and the word at which the table for it begins.
bool fill(PolyattnCall& call, const xla::Frame& frame) {
    constexpr int64_t SIZE = sizeof(PolyattnCall) / 8;
    const Words given = words(frame.attributes, "call"), places = words(frame.attributes, "places"),
                tables = words(frame.attributes, "tables");
    const xla::Buffers *arguments = &frame.arguments, *results = &frame.results;
    if (given.count < SIZE || places.count != arguments->count + results->count) return false;
    std::memcpy(&call, given.data, sizeof(call));
    for (int64_t i = 0; i < places.count; ++i) {
        const bool is_result = i >= arguments->count;
        const xla::Buffer* buffer = is_result ? results->buffers[i - arguments->count] : arguments->buffers[i];
        const int64_t place = places.data[i] & 0xffffffff, bytes = places.data[i] >> 32;
        const void* from = bytes ? buffer->data : &buffer->data;
        if (!put(call, place, from, bytes ? (size_t)bytes : sizeof(void*))) return false;
    }
    for (int64_t i = 0; i + 1 < tables.count; i += 2) {
        const int64_t word = tables.data[i + 1];
        if (word < SIZE || word + call.items > given.count) return false;
        const void* table = given.data + word;
        if (!put(call, tables.data[i], &table, sizeof(table))) return false;
    }
    return true;
}

xla::Error* handle(xla::Frame* frame, Function function) {
    if (answers(*frame) || frame->stage != xla::EXECUTE) return nullptr;
    PolyattnCall call;
    if (!fill(call, *frame))
        return error(*frame, "polyattn-native does not know this program: compile it again", xla::INVALID_ARGUMENT);
    void* state = nullptr;
    int found;
    while ((found = function(&call, &state)) > 0) {}
    return found == 0 ? nullptr : error(*frame, "out of memory", xla::RESOURCE_EXHAUSTED);
}

}  // namespace

extern "C" {
POLYATTN_API xla::Error* polyattn_xla_attend(xla::Frame* frame) { return handle(frame, polyattn_attend); }
POLYATTN_API xla::Error* polyattn_xla_differentiate(xla::Frame* frame) { return handle(frame, polyattn_differentiate); }
POLYATTN_API xla::Error* polyattn_xla_push_forward(xla::Frame* frame) { return handle(frame, polyattn_push_forward); }
}
