/* An NVIDIA driver library without a device. It has the functions of libcuda that kvoffload and Triton call, and a few
for tests.

Streams are queues. Either each stream has a thread, which runs its operations with random delays, or operations run only
in `emu_step`, and a seeded generator draws the stream of each. Device memory is mapped twice: without access at the
address that the caller sees, and with access at an address that only this file knows. So the host cannot read it by
mistake.

Vector clocks find races, so the delays do not matter. The host and each stream have a clock. An operation has a copy of
the host's clock from when it was enqueued. An event has a copy of its stream's clock; a query that finds the event passed
joins this copy into the host's clock. Two overlapping accesses, at least one of them a write, are a race unless the later
one's clock includes the earlier one. Reads that the driver may make at any time (order ANY) have only the clock of their
submission.

A stream holds `depth` operations; each copy of a batch is one. A call that finds the stream full waits until the stream
has run some operations. Waits are counted, and also those under the interpreter's lock. A call under that lock does not
really wait, because making room could need the lock.

Time is modelled, not measured: an operation begins when the operation before it has ended, the event that it waits for
has passed, and it was submitted. It ends after its cost. So streams overlap, and a seed always gives the same times. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define AGENTS 96 /* agent 0 is the host, the others are streams; simulations start many engines and close none */
#define DEVICES 2 /* their legacy default streams are the last agents */
#define TABLE 65536
#define PAGE_BITS 8
#define LARGE 65536 /* accesses of more bytes are rare, so they are compared with all others */
#define BUCKETS (1 << 20)

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
       INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, ALREADY_REGISTERED = 712,
       NOT_REGISTERED = 713, LAUNCH_FAILED = 719, NOT_SUPPORTED = 801,
       CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901 };
enum { GLOBAL, THREAD_LOCAL, RELAXED };
enum { COPY, RECORD, WAIT, WRITE, READ, RUNS, RELEASE, HOST, ALLOCATE, PAUSE };
enum { IN_ORDER = 1, DURING_CALL = 2, ANY = 3 };

typedef int Result;
typedef uint64_t Address;
typedef struct { uint32_t t[AGENTS]; } Clock;
typedef struct { int done, references; Clock clock; double at; } Recorded;
typedef struct Event { int device, timed; Recorded *last; struct Event *next; } Event;
typedef struct Op {
    int kind, order;
    Address target, source;
    size_t size;
    uint64_t seed, number;
    double cost, submitted_at;
    Recorded *recorded;
    Clock host;
    struct Op *next;
} Op;
typedef struct Stream {
    int alive, agent, device, priority, capturing, capture_mode, invalid, ending, length;
    pthread_t capture_thread, thread;
    Op *first, *last;
    Clock clock;
    double time;
} Stream;
typedef struct { Address low, high; char *shadow; int device, unmapped; } Allocation;
typedef struct { Address low, high; } Range;
typedef struct { Address low, high; int agent, write; uint32_t epoch; uint64_t number; int kind; } Access;
typedef struct { Address page; int access, next; } Place; /* a page that an access touches */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Stream streams[AGENTS];
static Clock host;
static Allocation *allocations;
static Range *registered;
static Access *accesses;
static Place *places;
static int buckets[BUCKETS], place_count, place_capacity; /* the last place of each bucket, or 0 */
static int *large, large_count, large_capacity;
static int allocation_count, registered_count, access_count, access_capacity, prune_at = 1024;
static int initialized, version = 13000, stepped, pageable_is_fine, retained[DEVICES], broken[DEVICES], shifted, arch = 90;
static int batch_limit = -1, depth = 1024, pins = 1;
static unsigned most_delay_us;
static int spoils; /* whether each copy changes its first byte */
static uint64_t drawn = 1, operations, races, wrong, faults, executed, waits, waits_with_lock;
static Recorded *gate;
static double host_time;
static char report[1 << 16];
static size_t report_length;
static __thread int current = -1, capture_mode = GLOBAL;
static struct { const char *name; long count, with_gil; int code, skip, times; } calls[128];
static int (*gil_check)(void);

static uint64_t draw(void) { drawn ^= drawn << 13; drawn ^= drawn >> 7; drawn ^= drawn << 17; return drawn; }
static void join(Clock *into, const Clock *from) {
    for (int i = 0; i < AGENTS; i++) if (from->t[i] > into->t[i]) into->t[i] = from->t[i];
}
static void say(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    if (report_length + 512 < sizeof report) report_length += vsnprintf(report + report_length, 512, format, arguments);
    va_end(arguments);
}

/* --- accesses ---------------------------------------------------------------------------------------------------- */

static const char *kinds[] = {"copy", "record", "wait", "kernel's write", "kernel's read", "page kernel", "free", "host", "scan", "allocation", "pause"};
static const char *who(int agent, char *text) {
    if (agent) sprintf(text, "stream %d (device %d, priority %d)", agent, streams[agent].device, streams[agent].priority);
    else strcpy(text, "host");
    return text;
}
static int *bucket_of(Address page) { return &buckets[(page ^ page >> 20) % BUCKETS]; }
static void note_places(int access) {
    if (accesses[access].high - accesses[access].low > LARGE) {
        if (large_count == large_capacity) {
            large_capacity = large_capacity ? 2 * large_capacity : 256;
            large = realloc(large, large_capacity * sizeof *large);
        }
        large[large_count++] = access;
        return;
    }
    for (Address page = accesses[access].low >> PAGE_BITS; page <= (accesses[access].high - 1) >> PAGE_BITS; page++) {
        if (place_count + 1 >= place_capacity) {
            place_capacity = place_capacity ? 2 * place_capacity : 4096;
            places = realloc(places, place_capacity * sizeof *places);
        }
        int *bucket = bucket_of(page);
        places[++place_count] = (Place){page, access, *bucket};
        *bucket = place_count;
    }
}
static void forget_places(void) {
    memset(buckets, 0, sizeof buckets);
    place_count = large_count = 0;
}
static void prune(void) {
    Clock floor = host;
    for (int s = 1; s < AGENTS; s++)
        for (Op *op = streams[s].first; op; op = op->next)
            for (int i = 0; i < AGENTS; i++) if (op->host.t[i] < floor.t[i]) floor.t[i] = op->host.t[i];
    int kept = 0;
    for (int i = 0; i < access_count; i++)
        if (accesses[i].epoch > floor.t[accesses[i].agent]) accesses[kept++] = accesses[i];
    access_count = kept;
    prune_at = 2 * kept > 1024 ? 2 * kept : 1024;
    forget_places();
    for (int i = 0; i < kept; i++) note_places(i);
}
static void compare(const Access *mine, const Access *other, const Clock *sees) {
    if (other->low >= mine->high || mine->low >= other->high || !(mine->write || other->write)) return;
    if (sees->t[other->agent] >= other->epoch) return;
    char first[80], second[80];
    if (races++ < 20)
        say("race: %s of operation %llu on %s, %s [%llx, %llx) | %s of operation %llu on %s, %s [%llx, %llx)\n",
            kinds[other->kind], (unsigned long long)other->number, who(other->agent, first), other->write ? "writes" : "reads",
            (unsigned long long)other->low, (unsigned long long)other->high, kinds[mine->kind], (unsigned long long)mine->number,
            who(mine->agent, second), mine->write ? "writes" : "reads", (unsigned long long)mine->low, (unsigned long long)mine->high);
}
static void touch(Address low, size_t size, int write, int agent, uint32_t epoch, const Clock *sees, uint64_t number, int kind) {
    Access mine = {low, low + size, agent, write, epoch, number, kind};
    if (!size) return;
    if (size > LARGE) for (int i = 0; i < access_count; i++) compare(&mine, &accesses[i], sees);
    else for (int i = 0; i < large_count; i++) compare(&mine, &accesses[large[i]], sees);
    for (Address page = low >> PAGE_BITS; size <= LARGE && page <= (mine.high - 1) >> PAGE_BITS; page++)
        for (int i = *bucket_of(page); i; i = places[i].next) {
            Access *other = &accesses[places[i].access];
            Address overlap = other->low > low ? other->low : low; /* compare a pair once, at the beginning of its overlap */
            if (places[i].page == page && overlap >> PAGE_BITS == page) compare(&mine, other, sees);
        }
    if (access_count >= prune_at) prune();
    if (access_count == access_capacity) {
        access_capacity = access_capacity ? 2 * access_capacity : 4096;
        accesses = realloc(accesses, access_capacity * sizeof *accesses);
    }
    accesses[access_count] = mine;
    note_places(access_count++);
}
static void host_touch(Address low, size_t size, int write, int kind) {
    host.t[0]++;
    touch(low, size, write, 0, host.t[0], &host, ++operations, kind);
}
static Allocation *allocation_of(Address address, size_t size) {
    for (int i = allocation_count - 1; i >= 0; i--)
        if (allocations[i].low <= address && address < allocations[i].high)
            return address + size <= allocations[i].high ? &allocations[i] : NULL;
    return NULL;
}
/* 1: inside one registration; 0: outside of all; -1: partly in one, or in more than one. */
static int registration(Address low, size_t size) {
    for (int i = 0; i < registered_count; i++) {
        if (low + size <= registered[i].low || registered[i].high <= low) continue;
        return registered[i].low <= low && low + size <= registered[i].high ? 1 : -1;
    }
    return 0;
}
static int is_mapped(Address low, size_t size) {
    Address first = low & ~(Address)4095;
    return !msync((void *)first, low + size - first, MS_ASYNC); /* this call only checks the mapping */
}
static char *reach(Address address, size_t size) {
    Allocation *found = allocation_of(address, size);
    if (found) return found->unmapped ? NULL : found->shadow + (address - found->low);
    return registration(address, size) == 1 || (pageable_is_fine && is_mapped(address, size)) ? (char *)address : NULL;
}
static int is_usable(Address address, size_t size) { return reach(address, size) != NULL; }

/* --- what a stream runs ------------------------------------------------------------------------------------------ */

static uint64_t pattern(uint64_t seed, uint64_t place) {
    uint64_t value = (seed + 1) * 0x9E3779B97F4A7C15ull + place * 0xC2B2AE3D27D4EB4Full;
    return value ^ value >> 29;
}
static void fill(char *at, size_t size, uint64_t seed) {
    for (size_t i = 0; i < size; i += 8) {
        uint64_t value = pattern(seed, i / 8);
        memcpy(at + i, &value, size - i < 8 ? size - i : 8);
    }
}
static int is_filled(const char *at, size_t size, uint64_t seed) {
    for (size_t i = 0; i < size; i += 8) {
        uint64_t value = pattern(seed, i / 8);
        if (memcmp(at + i, &value, size - i < 8 ? size - i : 8)) return 0;
    }
    return 1;
}
static void fault(Stream *stream, Op *op, int code) {
    faults++;
    broken[stream->device] = code;
    say("fault: %s of operation %llu reaches [%llx, %llx) or [%llx, %llx), which is neither device nor host memory\n",
        kinds[op->kind], (unsigned long long)op->number, (unsigned long long)op->source,
        (unsigned long long)(op->source + op->size), (unsigned long long)op->target, (unsigned long long)(op->target + op->size));
}
static void move(Stream *stream, Op *op, Address target, Address source, size_t size) {
    char *to = reach(target, size), *from = reach(source, size);
    if (!to || !from) { fault(stream, op, ILLEGAL_ADDRESS); return; }
    uint32_t epoch = stream->clock.t[stream->agent];
    touch(source, size, 0, stream->agent, epoch, op->order == ANY ? &op->host : &stream->clock, op->number, op->kind);
    touch(target, size, 1, stream->agent, epoch, &stream->clock, op->number, op->kind);
    memmove(to, from, size);
    if (spoils) ++*to;
}
static void unrefer(Recorded *recorded) { if (recorded && !--recorded->references) free(recorded); }
static int is_blocked(Stream *stream) {
    Op *op = stream->first;
    return !op || broken[stream->device] || (op->kind == WAIT && !op->recorded->done);
}
static void run_first(Stream *stream) {
    Op *op = stream->first;
    double begin = stream->time > op->submitted_at ? stream->time : op->submitted_at;
    join(&stream->clock, &op->host);
    stream->clock.t[stream->agent]++;
    if (op->kind == WAIT) {
        join(&stream->clock, &op->recorded->clock);
        if (op->recorded->at > begin) begin = op->recorded->at;
    }
    stream->time = begin + op->cost;
    uint32_t epoch = stream->clock.t[stream->agent];
    char *at;
    switch (op->kind) {
    case COPY: move(stream, op, op->target, op->source, op->size); break;
    case RECORD:
        op->recorded->clock = stream->clock;
        op->recorded->at = stream->time;
        op->recorded->done = 1;
        break;
    case WRITE: case READ:
        if (!(at = reach(op->target, op->size))) { fault(stream, op, ILLEGAL_ADDRESS); break; }
        touch(op->target, op->size, op->kind == WRITE, stream->agent, epoch, &stream->clock, op->number, op->kind);
        if (op->kind == WRITE) fill(at, op->size, op->seed);
        else if (!is_filled(at, op->size, op->seed) && wrong++ < 10)
            say("wrong bytes: operation %llu reads [%llx, %llx) and does not find pattern %llu\n", (unsigned long long)op->number,
                (unsigned long long)op->target, (unsigned long long)(op->target + op->size), (unsigned long long)op->seed);
        break;
    case RUNS: {
        int64_t *rows = (int64_t *)reach(op->source, 24 * op->size);
        if (!rows) { fault(stream, op, ILLEGAL_ADDRESS); break; }
        touch(op->source, 24 * op->size, 0, stream->agent, epoch, &stream->clock, op->number, op->kind);
        for (size_t i = 0; i < op->size && !broken[stream->device]; i++)
            move(stream, op, rows[i], rows[op->size + i], rows[2 * op->size + i]);
        break;
    }
    case RELEASE: case ALLOCATE:
        touch(op->target, op->size, 1, stream->agent, epoch, &stream->clock, op->number, op->kind);
        break;
    }
    executed++;
    stream->first = op->next;
    stream->length--;
    if (!stream->first) stream->last = NULL;
    if (!stream->first && stream->ending && stepped) stream->alive = 0;
    unrefer(op->recorded);
    free(op);
    pthread_cond_broadcast(&changed);
}
static void *serve(void *argument) {
    Stream *stream = argument;
    unsigned own = 88172645u + 977u * (unsigned)stream->agent + (unsigned)drawn;
    pthread_mutex_lock(&lock);
    while (!(stream->ending && (!stream->first || broken[stream->device]))) {
        if (is_blocked(stream)) {
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        if (stream->first->kind == PAUSE) { /* only this operation takes real time */
            useconds_t pause = 1e6 * stream->first->cost;
            pthread_mutex_unlock(&lock);
            usleep(pause);
            pthread_mutex_lock(&lock);
            if (!stream->first) continue;
        }
        run_first(stream);
        own = own * 1664525u + 1013904223u;
        if (most_delay_us && own >> 29 == 0) {
            pthread_mutex_unlock(&lock);
            usleep(own % most_delay_us);
            pthread_mutex_lock(&lock);
        }
    }
    stream->alive = 0;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return NULL;
}
static int step(void) {
    int ready[AGENTS], count = 0;
    for (int s = 1; s < AGENTS; s++) if (streams[s].alive && !is_blocked(&streams[s])) ready[count++] = s;
    if (!count) return 0;
    run_first(&streams[ready[draw() % count]]);
    return 1;
}
static void make_room(Stream *stream) {
    if (stream->length < depth || broken[stream->device]) return;
    waits++;
    if (gil_check && gil_check()) { waits_with_lock++; return; }
    pthread_cond_broadcast(&changed); /* wake the stream's thread: this call may have enqueued operations already */
    while (stream->length >= depth && !broken[stream->device])
        if (!stepped) pthread_cond_wait(&changed, &lock);
        else if (!step()) return; /* the stream waits for a gate that this thread will open */
}
static Op *enqueue(Stream *stream, int kind, double cost) {
    make_room(stream);
    Op *op = calloc(1, sizeof *op);
    op->kind = kind;
    op->order = IN_ORDER;
    op->cost = cost;
    op->number = ++operations;
    op->submitted_at = host_time;
    host.t[0]++;
    op->host = host;
    if (stream->last) stream->last->next = op; else stream->first = op;
    stream->last = op;
    stream->length++;
    return op;
}

/* --- entering a call --------------------------------------------------------------------------------------------- */

static int entry(const char *name) {
    int i = 0;
    while (i < 127 && calls[i].name && strcmp(calls[i].name, name)) i++;
    if (!calls[i].name) calls[i].name = strdup(name);
    return i;
}
static Result begin(const char *name, int needs_context) {
    int i = entry(name), code = 0;
    if (!gil_check) gil_check = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
    calls[i].count++;
    if (gil_check && gil_check()) calls[i].with_gil++;
    if (calls[i].times && calls[i].skip-- <= 0) { calls[i].times--; code = calls[i].code; calls[i].skip = 0; }
    if (!initialized) return NOT_INITIALIZED;
    if (needs_context && (current < 0 || !retained[current])) return INVALID_CONTEXT;
    if (needs_context && broken[current]) return broken[current];
    return code;
}
#define BEGIN(name, needs_context) \
    pthread_mutex_lock(&lock); \
    Result code = begin(name, needs_context); \
    if (code) goto end
#define END \
    end: \
    pthread_cond_broadcast(&changed); \
    pthread_mutex_unlock(&lock); \
    return code
#define FAIL(value) do { code = (value); goto end; } while (0)
/* A call that CUDA forbids while graphs are captured on the device fails and spoils the captures. Whether an unsafe call is
forbidden depends on the modes of the calling thread and of the capture. A call that synchronizes the device always is. */
#define UNSAFE if ((code = spoil(0))) goto end
#define SYNCHRONIZES if ((code = spoil(1))) goto end
static Result spoil(int synchronizes) {
    Result code = OK;
    for (int s = 1; s < AGENTS; s++) {
        Stream *stream = &streams[s];
        if (!stream->alive || !stream->capturing || stream->device != current) continue;
        int is_own = pthread_equal(stream->capture_thread, pthread_self());
        int is_allowed = capture_mode == RELAXED || stream->capture_mode == RELAXED
                      || (!is_own && (capture_mode == THREAD_LOCAL || stream->capture_mode == THREAD_LOCAL));
        if (is_allowed && !synchronizes) continue;
        stream->invalid = 1;
        code = CAPTURE_UNSUPPORTED;
    }
    return code;
}
static void start(Stream *stream, Stream as) {
    *stream = as;
    if (stepped) return;
    pthread_create(&stream->thread, NULL, serve, stream);
    pthread_detach(stream->thread);
}
/* A null handle is the legacy default stream of the thread's device. All other streams are non-blocking, so none waits for it. */
static Stream *stream_of(void *handle) {
    Stream *stream = handle;
    if (!stream && current >= 0) {
        stream = &streams[AGENTS - DEVICES + current];
        if (!stream->alive)
            start(stream, (Stream){.alive = 1, .agent = stream - streams, .device = current, .clock = stream->clock});
    }
    return stream >= streams + 1 && stream < streams + AGENTS && stream->alive ? stream : NULL;
}

/* --- devices and contexts ---------------------------------------------------------------------------------------- */

Result cuInit(unsigned flags) { initialized = 1; return OK; }
Result cuDriverGetVersion(int *found) { *found = version; return OK; }
Result cuDeviceGetCount(int *count) { *count = DEVICES; return OK; }
Result cuDeviceGet(int *device, int number) {
    if (!initialized) return NOT_INITIALIZED;
    if (number < 0 || number >= DEVICES) return INVALID_DEVICE;
    *device = number;
    return OK;
}
Result cuDeviceGetPCIBusId(char *text, int size, int device) { snprintf(text, size, "0000:%02X:00.0", 0x3b + device); return OK; }
Result cuDeviceGetName(char *text, int size, int device) { snprintf(text, size, "emulated device %d", device); return OK; }
Result cuDeviceTotalMem_v2(size_t *size, int device) { *size = 8ull << 30; return OK; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case 10: *value = 32; break;                 /* warp size */
    case 75: *value = arch / 10; break;          /* compute capability */
    case 76: *value = arch % 10; break;
    case 99: *value = pins; break;               /* host memory can be registered */
    case 8: case 81: case 97: *value = 232448; break; /* shared memory */
    default: *value = 1024;
    }
    return OK;
}
Result cuDevicePrimaryCtxRetain(void **context, int device) {
    BEGIN("cuDevicePrimaryCtxRetain", 0);
    if (device < 0 || device >= DEVICES) FAIL(INVALID_DEVICE);
    retained[device]++;
    *context = (void *)(uintptr_t)(0x1000 + device);
    END;
}
Result cuDevicePrimaryCtxRelease_v2(int device) {
    BEGIN("cuDevicePrimaryCtxRelease_v2", 0);
    if (retained[device]) retained[device]--;
    END;
}
Result cuCtxGetCurrent(void **context) {
    BEGIN("cuCtxGetCurrent", 0);
    *context = current < 0 ? NULL : (void *)(uintptr_t)(0x1000 + current);
    END;
}
Result cuCtxSetCurrent(void *context) {
    BEGIN("cuCtxSetCurrent", 0);
    current = context ? (int)((uintptr_t)context - 0x1000) : -1;
    END;
}
Result cuCtxGetDevice(int *device) { BEGIN("cuCtxGetDevice", 1); *device = current; END; }
Result cuCtxGetLimit(size_t *value, int limit) { *value = 0; return OK; }
Result cuCtxSetLimit(int limit, size_t value) { return OK; }
Result cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    BEGIN("cuCtxGetStreamPriorityRange", 1);
    *least = 0;
    *greatest = -5;
    END;
}
Result cuThreadExchangeStreamCaptureMode(int *mode) {
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return OK;
}
static const struct { int code; const char *name; } names[] = {
    {1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"}, {3, "CUDA_ERROR_NOT_INITIALIZED"},
    {101, "CUDA_ERROR_INVALID_DEVICE"}, {201, "CUDA_ERROR_INVALID_CONTEXT"}, {400, "CUDA_ERROR_INVALID_HANDLE"},
    {600, "CUDA_ERROR_NOT_READY"}, {700, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"}, {719, "CUDA_ERROR_LAUNCH_FAILED"},
    {801, "CUDA_ERROR_NOT_SUPPORTED"}, {810, "CUDA_ERROR_MPS_CLIENT_TERMINATED"}, {46, "CUDA_ERROR_DEVICE_UNAVAILABLE"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}, {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"}};
Result cuGetErrorName(int code, const char **name) {
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].code == code) { *name = names[i].name; return OK; }
    *name = NULL;
    return INVALID_VALUE;
}
Result cuGetErrorString(int code, const char **text) { return cuGetErrorName(code, text); }

/* --- streams and events ------------------------------------------------------------------------------------------ */

Result cuStreamCreateWithPriority(void **made, unsigned flags, int priority) {
    BEGIN("cuStreamCreateWithPriority", 1);
    if (flags != 1) FAIL(INVALID_VALUE); /* blocking streams are not modelled */
    for (int s = 1; s < AGENTS - DEVICES; s++) {
        Stream *stream = &streams[s];
        if (stream->alive) continue;
        start(stream, (Stream){.alive = 1, .agent = s, .device = current, .priority = priority, .clock = stream->clock});
        *made = stream;
        goto end;
    }
    code = OUT_OF_MEMORY;
    END;
}
Result cuStreamDestroy_v2(void *handle) {
    BEGIN("cuStreamDestroy_v2", 1);
    Stream *stream = handle ? stream_of(handle) : NULL;
    if (!stream) FAIL(INVALID_HANDLE);
    stream->ending = 1;
    if (stepped && !stream->first) stream->alive = 0;
    END;
}
Result cuStreamGetPriority(void *handle, int *priority) { *priority = ((Stream *)handle)->priority; return OK; }
Result cuStreamQuery(void *handle) {
    BEGIN("cuStreamQuery", 1);
    if ((code = spoil(!handle))) goto end;
    Stream *stream = stream_of(handle);
    if (!stream) FAIL(INVALID_HANDLE);
    if (stream->first) FAIL(NOT_READY);
    join(&host, &stream->clock);
    END;
}
Result cuCtxSynchronize(void) {
    BEGIN("cuCtxSynchronize", 1);
    SYNCHRONIZES;
    for (int s = 1; s < AGENTS; s++) {
        Stream *stream = &streams[s];
        while (stream->alive && stream->device == current && stream->first && !broken[current])
            if (stepped) { if (!step()) FAIL(LAUNCH_FAILED); } else pthread_cond_wait(&changed, &lock);
        if (stream->device == current) join(&host, &stream->clock);
    }
    code = broken[current];
    END;
}
Result cuStreamSynchronize(void *handle) {
    BEGIN("cuStreamSynchronize", 1);
    if ((code = spoil(!handle))) goto end;
    Stream *stream = stream_of(handle);
    if (!stream) FAIL(INVALID_HANDLE);
    while (stream->first && !broken[stream->device])
        if (stepped) { if (!step()) FAIL(LAUNCH_FAILED); } else pthread_cond_wait(&changed, &lock);
    code = broken[stream->device];
    join(&host, &stream->clock);
    if (stream->time > host_time) host_time = stream->time;
    END;
}
Result cuStreamIsCapturing(void *handle, int *status) {
    Stream *stream = stream_of(handle);
    *status = stream && stream->capturing;
    return OK;
}
Result cuStreamBeginCapture_v2(void *handle, int mode) {
    BEGIN("cuStreamBeginCapture_v2", 1);
    if (!handle) FAIL(CAPTURE_UNSUPPORTED);
    Stream *stream = stream_of(handle);
    stream->capturing = 1;
    stream->invalid = 0;
    stream->capture_mode = mode;
    stream->capture_thread = pthread_self();
    END;
}
Result cuStreamEndCapture(void *handle, void **graph) {
    BEGIN("cuStreamEndCapture", 1);
    Stream *stream = stream_of(handle);
    stream->capturing = 0;
    *graph = stream->invalid ? NULL : stream;
    if (stream->invalid) FAIL(CAPTURE_INVALIDATED);
    END;
}
Result cuEventCreate(void **made, unsigned flags) {
    BEGIN("cuEventCreate", 1);
    Event *event = calloc(1, sizeof *event);
    event->device = current;
    event->timed = !(flags & 2);
    *made = event;
    END;
}
Result cuEventDestroy_v2(void *handle) {
    BEGIN("cuEventDestroy_v2", 0);
    unrefer(((Event *)handle)->last);
    free(handle);
    END;
}
Result cuEventRecord(void *handle, void *on) {
    BEGIN("cuEventRecord", 1);
    Event *event = handle;
    Stream *stream = stream_of(on);
    if (!stream || event->device != stream->device) FAIL(INVALID_HANDLE);
    if (stream->capturing) goto end;
    unrefer(event->last);
    event->last = calloc(1, sizeof *event->last);
    event->last->references = 2;
    enqueue(stream, RECORD, 0)->recorded = event->last;
    END;
}
Result cuStreamWaitEvent(void *on, void *handle, unsigned flags) {
    BEGIN("cuStreamWaitEvent", 1);
    Event *event = handle;
    Stream *stream = stream_of(on);
    if (!stream) FAIL(INVALID_HANDLE);
    if (!event->last) goto end;
    event->last->references++;
    enqueue(stream, WAIT, 0)->recorded = event->last;
    END;
}
Result cuEventQuery(void *handle) {
    BEGIN("cuEventQuery", 1);
    UNSAFE;
    Event *event = handle;
    if (!event->last) goto end;
    if (!event->last->done) FAIL(NOT_READY);
    join(&host, &event->last->clock);
    if (event->last->at > host_time) host_time = event->last->at;
    END;
}
Result cuEventSynchronize(void *handle) {
    BEGIN("cuEventSynchronize", 1);
    UNSAFE;
    Event *event = handle;
    while (event->last && !event->last->done && !broken[event->device])
        if (stepped) { if (!step()) FAIL(LAUNCH_FAILED); } else pthread_cond_wait(&changed, &lock);
    code = broken[event->device];
    if (event->last) join(&host, &event->last->clock);
    END;
}
Result cuEventElapsedTime(float *milliseconds, void *start, void *end_event) {
    BEGIN("cuEventElapsedTime", 1);
    Event *first = start, *second = end_event;
    if (!first->timed || !second->timed || !first->last || !second->last) FAIL(INVALID_HANDLE);
    if (!first->last->done || !second->last->done) FAIL(NOT_READY);
    *milliseconds = (float)((second->last->at - first->last->at) * 1e3);
    END;
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

static Result allocate(Address *address, size_t size) {
    size_t whole = (size + 4095) / 4096 * 4096;
    int file = memfd_create("device", 0);
    if (file < 0 || ftruncate(file, whole)) return OUT_OF_MEMORY;
    void *seen = mmap(NULL, whole, PROT_NONE, MAP_SHARED, file, 0);
    void *shadow = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (seen == MAP_FAILED || shadow == MAP_FAILED) return OUT_OF_MEMORY;
    allocations[allocation_count++] = (Allocation){(Address)seen, (Address)seen + size, shadow, current, 0};
    *address = (Address)seen;
    return OK;
}
static Result release(Address address, Stream *stream) {
    for (int i = 0; i < allocation_count; i++) {
        if (allocations[i].low != address) continue;
        size_t size = allocations[i].high - address;
        if (stream) { Op *op = enqueue(stream, RELEASE, 0); op->target = address; op->size = size; return OK; }
        host_touch(address, size, 1, RELEASE);
        allocations[i] = allocations[--allocation_count]; /* the pages stay mapped, so that no address is used twice */
        return OK;
    }
    return INVALID_VALUE;
}
Result cuMemAlloc_v2(Address *address, size_t size) { BEGIN("cuMemAlloc_v2", 1); UNSAFE; code = allocate(address, size); END; }
Result cuMemAllocAsync(Address *address, size_t size, void *on) {
    BEGIN("cuMemAllocAsync", 1);
    if (!stream_of(on)) FAIL(INVALID_HANDLE);
    if ((code = allocate(address, size))) goto end;
    Op *op = enqueue(stream_of(on), ALLOCATE, 0); /* using the memory before this operation is a race */
    op->target = *address;
    op->size = size;
    END;
}
Result cuMemFree_v2(Address address) { BEGIN("cuMemFree_v2", 1); SYNCHRONIZES; code = release(address, NULL); END; }
Result cuMemFreeAsync(Address address, void *on) {
    BEGIN("cuMemFreeAsync", 1);
    if (!stream_of(on)) FAIL(INVALID_HANDLE);
    code = release(address, stream_of(on));
    END;
}
Result cuMemHostRegister_v2(void *start, size_t size, unsigned flags) {
    BEGIN("cuMemHostRegister_v2", 1);
    UNSAFE;
    if (!pins) FAIL(NOT_SUPPORTED);
    if (registration((Address)start, size)) FAIL(ALREADY_REGISTERED);
    if (registered_count == TABLE) FAIL(OUT_OF_MEMORY);
    registered[registered_count++] = (Range){(Address)start, (Address)start + size};
    END;
}
Result cuMemHostUnregister(void *start) {
    BEGIN("cuMemHostUnregister", 1);
    UNSAFE;
    for (int i = 0; i < registered_count; i++) {
        if (registered[i].low != (Address)start) continue;
        host_touch((Address)start, registered[i].high - registered[i].low, 1, HOST);
        registered[i] = registered[--registered_count];
        goto end;
    }
    code = NOT_REGISTERED;
    END;
}
Result cuMemHostGetDevicePointer_v2(Address *address, void *start, unsigned flags) {
    BEGIN("cuMemHostGetDevicePointer_v2", 1);
    if (registration((Address)start, 1) != 1) FAIL(INVALID_VALUE);
    *address = (Address)start + shifted;
    END;
}
static Result copy(Stream *stream, Address target, Address source, size_t size, int order, double cost) {
    Allocation *ends[] = {allocation_of(target, size), allocation_of(source, size)};
    for (int i = 0; i < 2; i++) if (ends[i] && ends[i]->unmapped) { faults++; say("fault: a copy of memory that was taken away\n"); }
    if (!stream || !is_usable(target, size) || !is_usable(source, size)) return INVALID_VALUE;
    if (stream->capturing) return OK;
    Op *op = enqueue(stream, COPY, cost + size / 50e9);
    op->target = target;
    op->source = source;
    op->size = size;
    op->order = order;
    return OK;
}
Result cuMemcpyAsync(Address target, Address source, size_t size, void *on) {
    BEGIN("cuMemcpyAsync", 1);
    code = copy(stream_of(on), target, source, size, IN_ORDER, 3e-6);
    END;
}
typedef struct { unsigned order, hints[4], flags; } Attributes;
static Result batch_copy(Address *targets, Address *sources, size_t *sizes, size_t count, Attributes *attributes,
                         size_t *indices, size_t attribute_count, size_t *failed, void *on) {
    BEGIN("cuMemcpyBatchAsync", 1);
    *failed = SIZE_MAX;
    Stream *stream = stream_of(on);
    if (!on || !stream || !count || attribute_count != 1 || indices[0]) FAIL(INVALID_VALUE); /* the default stream takes no batches */
    for (int i = 0; i < 4; i++) if (attributes->hints[i]) FAIL(INVALID_VALUE);
    if (attributes->order < IN_ORDER || attributes->order > ANY) FAIL(INVALID_VALUE);
    for (size_t i = 0; i < count; i++) {
        code = batch_limit >= 0 && (int)i >= batch_limit ? OUT_OF_MEMORY
             : copy(stream, targets[i], sources[i], sizes[i], attributes->order, 1e-6);
        if (code) { *failed = i; goto end; }
    }
    END;
}
Result cuGetProcAddress_v2(const char *name, void **found, int wanted, uint64_t flags, int *status) {
    int unwanted;
    if (!status) status = &unwanted;
    *found = NULL;
    *status = 1; /* not known */
    if (wanted > version) { *status = 2; return INVALID_VALUE; }
    if (!strcmp(name, "cuMemcpyBatchAsync")) {
        if (version < 12080) return NOT_FOUND;
        if (wanted >= 12080 && wanted < 13000) *found = (void *)batch_copy; /* CUDA 13.0 also has a form with 8 arguments */
    } else {
        char second[128];
        snprintf(second, sizeof second, "%s_v2", name);
        if (!(*found = dlsym(RTLD_DEFAULT, name))) *found = dlsym(RTLD_DEFAULT, second);
    }
    *status = *found ? 0 : 1;
    return *found ? OK : NOT_FOUND;
}
Result cuPointerGetAttribute(void *data, int attribute, Address address) { *(Address *)data = address; return OK; }
Result cuPointerGetAttributes(unsigned count, int *which, void **data, Address address) {
    for (unsigned i = 0; i < count; i++) if (which[i] == 3) *(Address *)data[i] = address;
    return OK;
}

/* --- kernels ----------------------------------------------------------------------------------------------------- */

Result cuModuleLoadData(void **module, const void *image) { BEGIN("cuModuleLoadData", 1); UNSAFE; *module = (void *)0x77; END; }
Result cuModuleUnload(void *module) { return OK; }
Result cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = strdup(name);
    return OK;
}
Result cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute == 0 ? 1024 : 0; return OK; }
Result cuFuncSetAttribute(void *function, int attribute, int value) { return OK; }
Result cuFuncSetCacheConfig(void *function, int config) { return OK; }
typedef struct { unsigned grid[3], block[3], shared; void *stream; } LaunchConfig;
static Result launch(Stream *stream, const char *name, void **parameters) {
    if (!stream) return INVALID_HANDLE;
    if (!strcmp(name, "kvoffload_pause")) {
        enqueue(stream, PAUSE, *(uint64_t *)parameters[0] / 1e9);
        return OK;
    }
    if (strcmp(name, "_copy_runs")) return NOT_FOUND;
    Op *op = enqueue(stream, RUNS, 5e-6);
    op->source = *(Address *)parameters[0];
    op->size = *(int32_t *)parameters[1];
    return OK;
}
Result cuLaunchKernelEx(const LaunchConfig *config, void *function, void **parameters, void **extra) {
    BEGIN("cuLaunchKernelEx", 1);
    code = launch(stream_of(config->stream), function, parameters);
    END;
}

Result cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                      unsigned block_z, unsigned shared, void *on, void **parameters, void **extra) {
    BEGIN("cuLaunchKernel", 1);
    code = launch(stream_of(on), function, parameters);
    END;
}

/* In a forked process the driver counts as never initialized, so it refuses every call. */
static void forked(void) {
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&changed, NULL); /* otherwise a broadcast waits for the parent's threads */
    initialized = 0;
}
__attribute__((constructor)) static void load(void) {
    pthread_atfork(NULL, NULL, forked);
    allocations = calloc(TABLE, sizeof *allocations);
    registered = calloc(TABLE, sizeof *registered);
    spoils = getenv("EMULATOR_SPOILS") != NULL;
}

/* --- for tests --------------------------------------------------------------------------------------------------- */

void emu_reset(int is_stepped, uint64_t seed, unsigned delay_us, int driver_version) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < DEVICES; i++) retained[i] = broken[i] = 0;
    for (int s = 1; s < AGENTS; s++) { /* drop queued operations, because their memory may be gone */
        Op *op = streams[s].first;
        while (op) { Op *next = op->next; unrefer(op->recorded); free(op); op = next; }
        streams[s].first = streams[s].last = NULL;
        streams[s].ending = 1;
    }
    pthread_cond_broadcast(&changed);
    for (int s = 1; s < AGENTS; s++) {
        if (stepped) streams[s].alive = 0;
        while (streams[s].alive) { pthread_cond_wait(&changed, &lock); }
        memset(&streams[s], 0, sizeof streams[s]);
    }
    allocation_count = registered_count = access_count = 0; /* as in a new process */
    forget_places();
    memset(&host, 0, sizeof host);
    for (int i = 0; i < 128; i++) calls[i].count = calls[i].with_gil = calls[i].times = calls[i].skip = 0;
    stepped = is_stepped, drawn = seed * 2654435761u + 88172645463325252ull, most_delay_us = delay_us, version = driver_version;
    races = wrong = faults = operations = executed = waits = waits_with_lock = report_length = 0;
    depth = 1024, pins = 1, gate = NULL;
    report[0] = 0, host_time = 0, batch_limit = -1, shifted = pageable_is_fine = 0, arch = 90;
    pthread_mutex_unlock(&lock);
}
int emu_step(int count) {
    pthread_mutex_lock(&lock);
    int done = 0;
    while (done < count && step()) done++;
    pthread_mutex_unlock(&lock);
    return done;
}
/* Make operations that are enqueued on the stream from now on wait until `emu_open`. */
int emu_gate(void *on) {
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(on);
    if (!gate) gate = calloc(1, sizeof *gate);
    gate->references += 2; /* it is never freed */
    if (stream) enqueue(stream, WAIT, 0)->recorded = gate;
    pthread_mutex_unlock(&lock);
    return stream ? OK : INVALID_HANDLE;
}
void emu_open(void) {
    pthread_mutex_lock(&lock);
    if (gate) gate->done = 1;
    gate = NULL;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}
/* Launch an engine's kernel, which writes a pattern or compares the memory with it. */
int emu_kernel(void *on, Address address, size_t size, uint64_t seed, int writes, double cost) {
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(on);
    if (stream && !stream->capturing) {
        Op *op = enqueue(stream, writes ? WRITE : READ, cost);
        op->target = address, op->size = size, op->seed = seed;
    }
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return stream ? OK : INVALID_HANDLE;
}
/* Copy device memory without an operation. Return whether the memory exists. */
int emu_peek(Address address, void *into, size_t size) {
    pthread_mutex_lock(&lock);
    Allocation *found = allocation_of(address, size);
    if (found) memcpy(into, found->shadow + (address - found->low), size);
    pthread_mutex_unlock(&lock);
    return found != NULL;
}
/* Take an allocation's memory away, or give it other memory, at the same address. Its bytes are lost. A use that the host has not
seen end is a race, and a use without memory is a fault. Return whether the allocation exists. */
int emu_map(Address address, int mapped) {
    pthread_mutex_lock(&lock);
    Allocation *found = allocation_of(address, 1);
    if (found) {
        found->unmapped = !mapped;
        host_touch(found->low, found->high - found->low, 1, RELEASE);
        memset(found->shadow, mapped ? 0x5a : 0xa5, found->high - found->low);
    }
    pthread_mutex_unlock(&lock);
    return found != NULL;
}
void emu_fail(const char *name, int code, int skip, int times) {
    pthread_mutex_lock(&lock);
    int i = entry(name);
    calls[i].code = code, calls[i].skip = skip, calls[i].times = times;
    pthread_mutex_unlock(&lock);
}
void emu_break(int device, int code) {
    pthread_mutex_lock(&lock);
    broken[device] = code;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}
long emu_calls(const char *name, int with_gil) { /* an empty name counts the calls of all functions */
    pthread_mutex_lock(&lock);
    long found = 0;
    for (int i = 0; i < 128 && calls[i].name; i++)
        if (!*name || !strcmp(calls[i].name, name)) found += with_gil ? calls[i].with_gil : calls[i].count;
    pthread_mutex_unlock(&lock);
    return found;
}
int emu_contexts(void) { int mask = 0; for (int i = 0; i < DEVICES; i++) mask |= (retained[i] > 0) << i; return mask; }
int emu_current(void) { return current; }
int emu_capture_mode(void) { return capture_mode; }
int emu_registered(void) { return registered_count; }
uint64_t emu_count(int which) {
    uint64_t all[] = {races, wrong, faults, executed, waits, waits_with_lock};
    return all[which];
}
const char *emu_report(void) { return report; }
void emu_set(int what, int value) {
    int *settings[] = {&batch_limit, &shifted, &pageable_is_fine, &arch, &depth, &pins};
    *settings[what] = value;
}
double emu_time(double forward) { host_time += forward; return host_time; }
