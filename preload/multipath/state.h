/* What the parts of the library share: relays, targets and copies in progress. One lock guards all of it. */
#ifndef MOESERVE_PRELOAD_STATE_H
#define MOESERVE_PRELOAD_STATE_H
#include <pthread.h>
#include <time.h>

#include "relay.h"

/* The driver's own functions, which no preloaded library stands before. */
extern struct Calls {
#define CALL(name, parameters) CUresult(*name) parameters;
#include "calls.h"
#undef CALL
} own;

enum { MAX_DEVICES = 64, MAX_PARTS = 15, SETS = 3, MAX_PENDING = 128, MAX_CHUNKS = 512, KINDS = 6 };
#define MIB ((size_t)1 << 20)
#define BUFFER (16 * MIB)        /* of each stream of a set */
#define LEAST_CHUNK MIB          /* a smaller copy takes longer per byte */
#define LEAST_PART (2 * MIB)
#define LAST_BYTES (MIB / 4)     /* what the program's own call copies behind the wait */
#define SPARE_BYTES (1024 * MIB) /* left free on a relay */
#define RETRY_SECONDS 30         /* a GPU without relays is tried again after that */
#define FORGET_SECONDS 10        /* a context that ends waits so long for copies in progress */
#define CONFIRMED 4              /* an error that the driver repeats so often, 0.5 ms apart, is a context's own and stays */
#define HOPELESS 2000            /* repeated so often in a target, the copy is given up: the program has got the error */
#define REFUSALS 200             /* the process ends when a target that works has refused a copy so often */

/* Set is what relays a copy of one stream at a time. A relay has as many as leave each of their streams a queue
   of the hardware to itself, of which there are 8 by default: otherwise streams would wait for each other. */
typedef struct {
  Opaque stream[2], joined, begun, ended;
  CUdeviceptr buffer[2];
  volatile uint32_t *word; /* the value of the latest copy that has ended */
  uint32_t issued;         /* the value of the latest copy */
  unsigned long long user; /* the stream whose copies they are */
  int timing;              /* begun and ended are of a copy in progress */
  int reserved;            /* copies of user that are about to be enqueued */
} Set;

typedef struct {
  enum { UNTRIED, READY, FAILED, LOST } state;
  const char *what; /* the call that failed, */
  CUresult code;    /* and its result */
  CUdevice device;
  Opaque context;
  uint64_t reaches; /* devices whose memory it can access */
  Set sets[SETS];
  unsigned long long bytes;
} Relay;

typedef struct {
  Relay *relay;
  Set *set;
  uint32_t value;
  CUdeviceptr to, from;
  size_t bytes, chunks;
  int timed;
  int errors, refusals; /* that the relay's context has returned in a row; of the part in a target that works */
} Part;

typedef struct Target Target;

/* Pending is a copy that is being enqueued, or has been and is in progress. */
typedef struct {
  Target *target;
  enum { UNUSED, RESERVED, PENDING } state;
  int ended; /* end was recorded */
  int errors; /* passes in a row in which a part was to be made directly and the target's context was in error */
  int to_device, parts;
  int kind; /* by which rates are kept: direction and size */
  size_t bytes, direct;
  Opaque begin, middle, end;
  Part part[MAX_PARTS];
} Pending;

/* Target is a GPU whose copies are relayed. */
struct Target {
  enum { CLOSED, ASKED, OPEN, REFUSES } state;
  CUdevice device;
  Opaque context, direct; /* a stream for the parts of lost relays */
  time_t retry;
  int told; /* that its context is in error */
  Pending copies[MAX_PENDING];
  /* Bytes a second by kind of copy, 0 if unknown: of its own link, and over each relay. */
  double rate[KINDS], over[MAX_DEVICES][KINDS];
};

extern pthread_mutex_t lock;
extern pthread_cond_t changed;
extern Relay relays[MAX_DEVICES];
extern Target *targets[MAX_DEVICES];
extern int sets;                    /* of each relay */
extern uint64_t chosen;             /* the devices that may be relays */
extern int asked, pending;          /* targets to be opened, copies in progress */
extern int opening, ending, used;   /* a target is being opened; the process ends; a large copy was made */
extern double seconds;              /* that relayed copies took, */
extern unsigned long long measured; /* and their bytes */

/* open.c: load looks up the driver's functions, open_target prepares relays for copies of a device. */
int load(void);
int open_target(Target *t);
void close_target(Target *t);

/* watch.c: start makes the thread, if there is none. */
int start(void);

static inline time_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec;
}

static inline void nap(long ns) { nanosleep(&(struct timespec){.tv_nsec = ns}, NULL); }

/* enter makes a context current and leave the one that was before. Not by the thread's stack: if the driver refuses
   to pop a context that is in error, the program's next calls would be made in that one. */
static inline void leave(Opaque before) { own.cuCtxSetCurrent(before); }
static inline CUresult enter(Opaque context, Opaque *before) {
  CUresult result = own.cuCtxGetCurrent(before);
  if (result != SUCCESS) return result;
  result = own.cuCtxSetCurrent(context);
  if (result != SUCCESS) leave(*before);
  return result;
}

/* release ends a copy in progress; the lock is held. */
static inline void release(Pending *f) {
  for (int i = 0; i < f->parts; i++)
    if (f->part[i].timed) f->part[i].set->timing = 0;
  f->state = UNUSED;
  pending--;
  pthread_cond_broadcast(&changed);
}

/* works says whether a result is one of a context that is not in error. */
static inline int works(CUresult result) { return result == SUCCESS || result == NOT_READY || result == 4 /* the process ends */; }

static inline int reached(const Set *s, uint32_t value) { return (int32_t)(__atomic_load_n(s->word, __ATOMIC_ACQUIRE) - value) >= 0; }

#endif
