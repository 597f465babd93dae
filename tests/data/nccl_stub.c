/* NCCL and the CUDA runtime as seen by a caller: what arrived goes into a log, nothing is done. STUB_FAIL makes the communicator
   fail after its first broadcast. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char internal[128]; } ncclUniqueId;
typedef struct { size_t size; unsigned magic; unsigned version; int blocking; } ncclConfig;
typedef struct { int type; int device; void *device_pointer; void *host_pointer; } attributes;

static char text[65536];
static int waits, broken, stream_waits, streams;

#define LOG(...) snprintf(text + strlen(text), sizeof text - strlen(text), __VA_ARGS__)

const char *stub_log(void) { return text; }
void stub_clear(void) { text[0] = 0; broken = 0; }

int ncclGetVersion(int *version) { *version = 22907; return 0; }
int ncclGetUniqueId(ncclUniqueId *id) {
  for (int i = 0; i < 128; i++) id->internal[i] = (char)(255 - 2 * i);
  return 0;
}
int ncclCommInitRankConfig(void **comm, int ranks, ncclUniqueId id, int rank, ncclConfig *config) {
  int right = 0;
  for (int i = 0; i < 128; i++) right += id.internal[i] == (char)(255 - 2 * i);
  LOG("init ranks=%d id=%d/128 rank=%d size=%zu magic=%x version=%u blocking=%d\n", ranks, right, rank, config->size,
      config->magic, config->version, config->blocking);
  *comm = (void *)0x123456789abcdef0;
  waits = 2;
  return 7;
}
int ncclCommGetAsyncError(void *comm, int *state) {
  if (comm != (void *)0x123456789abcdef0) return 4;
  *state = waits ? 7 : broken ? 6 : 0;
  waits -= waits > 0;
  return 0;
}
static int collective(const char *name, void *from, void *to, size_t count, int type, int last, void *comm, void *stream) {
  if (waits || comm != (void *)0x123456789abcdef0) return 4;
  LOG("%s in_place=%d count=%zu type=%d last=%d stream=%zx\n", name, from == to, count, type, last, (size_t)stream);
  waits = stream_waits = 2;
  return 7;
}
int ncclAllReduce(void *from, void *to, size_t count, int type, int op, void *comm, void *stream) {
  return collective("all_reduce", from, to, count, type, op, comm, stream);
}
int ncclBroadcast(void *from, void *to, size_t count, int type, int root, void *comm, void *stream) {
  broken = getenv("STUB_FAIL") != NULL;
  return collective("broadcast", from, to, count, type, root, comm, stream);
}
int ncclCommAbort(void *comm) {
  LOG("abort %d\n", comm == (void *)0x123456789abcdef0);
  return 0;
}
const char *ncclGetErrorString(int code) { return code == 6 ? "remote process exited" : "other"; }
const char *ncclGetLastError(void *comm) { return comm ? "not null" : "last words"; }

int cudaSetDevice(int device) { return device == 3 ? 0 : 101; }
int cudaStreamCreateWithFlags(void **stream, unsigned flags) {
  *stream = (void *)(0xfedcba9876540000 + 16 * flags + streams++ % 2);
  return 0;
}
int cudaStreamQuery(void *stream) { return stream_waits > 0 && stream_waits-- ? 600 : 0; }
int cudaStreamDestroy(void *stream) { LOG("destroy %zx\n", (size_t)stream); return 0; }
int cudaMalloc(void **pointer, size_t size) { *pointer = calloc(1, size); return 0; }
int cudaMemsetAsync(void *pointer, int value, size_t size, void *stream) { memset(pointer, value, size); return 0; }
int cudaFree(void *pointer) { free(pointer); LOG("free\n"); return 0; }
int cudaPointerGetAttributes(attributes *found, void *pointer) {
  memset(found, 0, sizeof *found);
  found->type = pointer ? 2 : 0;
  found->device = 3;
  return 0;
}
const char *cudaGetErrorString(int code) { return code == 101 ? "invalid device ordinal" : "other"; }
