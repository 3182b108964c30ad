/* A stand-in for libcuda.so.1 that computes nothing: it writes every call it gets as a line of JSON to
 * $FAKE_CUDA_LOG. A module is its label, the text in place of machine code, "spec.dtype.sm.kernel".
 * $FAKE_CUDA_ARGS tells the arguments of each kernel, "prefill=pppi;...": p a pointer, i an int32.
 * $FAKE_CUDA_SM, $FAKE_CUDA_PROCESSORS and $FAKE_CUDA_SHARED describe the device, $FAKE_CUDA_FAIL names a
 * call that fails. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char label[128]; } Module;
typedef struct { Module* module; char name[128]; } Function;

static uintptr_t context = 0x1000;

void fake_set_context(uintptr_t value) { context = value; }

static FILE* begin(char const* call) {
    FILE* log = fopen(getenv("FAKE_CUDA_LOG"), "a");
    fprintf(log, "{\"call\": \"%s\"", call);
    return log;
}

static int end(FILE* log, char const* call) {
    fprintf(log, "}\n");
    fclose(log);
    char const* fail = getenv("FAKE_CUDA_FAIL");
    return fail && strcmp(fail, call) == 0 ? 209 : 0;
}

static int number(char const* name, int otherwise) { return getenv(name) ? atoi(getenv(name)) : otherwise; }

int cuInit(unsigned flags) { return end(begin("cuInit"), "cuInit"); }
int cuCtxGetCurrent(void** current) { *current = (void*)context; return 0; }
int cuCtxGetId(void* which, unsigned long long* id) { *id = (uintptr_t)which + 5; return 0; }
int cuCtxGetDevice(int* device) { *device = 0; return 0; }
int cuGetErrorString(int status, char const** text) { *text = "no kernel image is available"; return 0; }
int cuThreadExchangeStreamCaptureMode(int* mode) { *mode = 0; return 0; }
int cuFuncLoad(void* function) { return 0; }

int cuDeviceGetAttribute(int* value, int attribute, int device) {
    int const sm = number("FAKE_CUDA_SM", 89);
    *value = attribute == 75 ? sm / 10 : attribute == 76 ? sm % 10
        : attribute == 16 ? number("FAKE_CUDA_PROCESSORS", 24)
        : attribute == 97 ? number("FAKE_CUDA_SHARED", 101376) : -1;
    return 0;
}

int cuModuleLoadData(void** module, void const* image) {
    Module* made = calloc(1, sizeof *made);
    strncpy(made->label, image, sizeof made->label - 1);
    *module = made;
    FILE* log = begin("cuModuleLoadData");
    fprintf(log, ", \"label\": \"%s\", \"context\": %lu", made->label, (unsigned long)context);
    return end(log, "cuModuleLoadData");
}

int cuModuleUnload(void* module) { return end(begin("cuModuleUnload"), "cuModuleUnload"); }

int cuModuleGetFunction(void** function, Module* module, char const* name) {
    Function* made = calloc(1, sizeof *made);
    made->module = module;
    strncpy(made->name, name, sizeof made->name - 1);
    *function = made;
    return end(begin("cuModuleGetFunction"), "cuModuleGetFunction");
}

int cuFuncSetAttribute(Function* function, int attribute, int value) {
    FILE* log = begin("cuFuncSetAttribute");
    fprintf(log, ", \"function\": \"%s\", \"attribute\": %d, \"value\": %d", function->name, attribute, value);
    return end(log, "cuFuncSetAttribute");
}

int cuLaunchKernel(Function* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** arguments, void** extra) {
    FILE* log = begin("cuLaunchKernel");
    fprintf(log, ", \"label\": \"%s\", \"function\": \"%s\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u]",
            function->module->label, function->name, gx, gy, gz, bx, by, bz);
    fprintf(log, ", \"shared\": %u, \"stream\": %lu, \"extra\": %d, \"arguments\": [", shared, (unsigned long)stream,
            extra != NULL);
    char key[160];
    snprintf(key, sizeof key, "%s=", strrchr(function->module->label, '.') + 1);
    char const* kinds = strstr(getenv("FAKE_CUDA_ARGS"), key) + strlen(key);
    for (int i = 0; kinds[i] == 'p' || kinds[i] == 'i'; ++i) {
        unsigned long value = kinds[i] == 'p' ? *(unsigned long*)arguments[i] : (unsigned long)*(uint32_t*)arguments[i];
        fprintf(log, "%s%lu", i ? ", " : "", value);
    }
    fprintf(log, "]");
    return end(log, "cuLaunchKernel");
}
