// Handlers of XLA's custom calls. `xla_call.py` makes the PolyattnCall, and says where in it the address of each
// of XLA's buffers belongs.
#include "interface.h"
#include "xla_ffi.h"

#include <cstring>

namespace {

typedef int (*Function)(const PolyattnCall*, void**);

xla::Error* error(const xla::Frame& frame, const char* message, int32_t code) {
    xla::ErrorArguments arguments = {sizeof(arguments), nullptr, message, code};
    return frame.api->create_error(&arguments);
}

// The attribute of a name, or an empty array if it is not one of int64.
xla::Array words(const xla::Attributes& attributes, const char* name) {
    for (int64_t i = 0; i < attributes.count; ++i) {
        const xla::Text& text = *attributes.names[i];
        if (text.size != std::strlen(name) || std::memcmp(text.data, name, text.size)) continue;
        const xla::Array& array = *(const xla::Array*)attributes.values[i];
        if (attributes.types[i] == xla::ATTRIBUTE_ARRAY && array.dtype == xla::S64) return array;
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

// The attribute "call" is a PolyattnCall without addresses, and "places" are the bytes of it where those of
// arguments and results belong.
bool fill(PolyattnCall& call, const xla::Frame& frame) {
    const xla::Array given = words(frame.attributes, "call"), places = words(frame.attributes, "places");
    const xla::Buffers &arguments = frame.arguments, &results = frame.results;
    const int64_t count = arguments.count + results.count;
    if (given.size * 8 != sizeof(call) || (int64_t)places.size != count) return false;
    std::memcpy(&call, given.data, sizeof(call));
    for (int64_t i = 0; i < count; ++i) {
        const int64_t place = ((const int64_t*)places.data)[i], result = i - arguments.count;
        if (place < 0 || (size_t)place > sizeof(call) - sizeof(void*)) return false;
        const xla::Buffer* buffer = result < 0 ? arguments.buffers[i] : results.buffers[result];
        std::memcpy((char*)&call + place, &buffer->data, sizeof(void*));
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
    if (found == 0) return nullptr;
    if (found == -2) return error(*frame, "the process was forked amid this call: call again", xla::ABORTED);
    return error(*frame, "the compiled kernel found no memory for its tiles", xla::RESOURCE_EXHAUSTED);
}

}  // namespace

extern "C" {
POLYATTN_API xla::Error* polyattn_xla_attend(xla::Frame* frame) { return handle(frame, polyattn_attend); }
POLYATTN_API xla::Error* polyattn_xla_differentiate(xla::Frame* frame) { return handle(frame, polyattn_differentiate); }
}
