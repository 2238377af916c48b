/* Copies between host memory and a GPU in parts at the same time: one part over the GPU's own PCIe link, one
   over the link of each relay, which is another GPU: host, buffer in the relay's memory, GPU, or the other way
   round. See relay.c. */
#ifndef MOESERVE_PRELOAD_RELAY_H
#define MOESERVE_PRELOAD_RELAY_H
#include <stdint.h>
#include <stdio.h>

#include "../driver.h"

/* Why a copy was left to the driver as it is; RELAYED if it was not. */
typedef enum {
  RELAYED,
  SMALL,     /* less than the threshold */
  PAGEABLE,  /* host memory that is not pinned */
  MANAGED,   /* memory that the driver migrates */
  DEVICE,    /* not between the host and a GPU */
  RANGE,     /* not within one allocation */
  MEMORY,    /* memory of a pool, or mapped by the program, that a relay is not known to have access to; or with synchronous operations */
  CONTEXT,   /* the context, or the stream's, is not the primary one of the GPU */
  CAPTURED,  /* the stream is being captured into a graph */
  SHAPE,     /* two or three dimensions */
  ACCESS,    /* no relay can access the memory */
  STARTING,  /* relays are being opened */
  NO_RELAY,  /* there is none for this GPU */
  BUSY,      /* the relays' buffers are in use by copies of other streams */
  REFUSED,   /* the driver refused an operation; the copy was made all the same */
  REASONS
} Reason;
extern const char *const reason_names[REASONS];

/* What the driver says of the memory at an address. */
typedef struct {
  int host, device; /* which memory; neither: the driver does not know it */
  int managed, plain, synchronous;
  CUdevice ordinal;
  CUdeviceptr begin, size; /* of the allocation */
} Memory;

/* A copy that a program has asked for. */
typedef struct {
  CUdeviceptr to, from;
  size_t bytes;
  Opaque stream; /* a handle that means the same to all calls: never 0 */
  /* result is that of a failed direct part, which the program must see. */
  CUresult result;
  /* The rest is of relay.c. */
  void *pending;
} Copy;

/* decide says by the facts alone whether a copy may be relayed. */
typedef struct {
  Memory to, from;
  CUdevice device;  /* of the current context, */
  int stream_there; /* which is that of the stream */
  int capturing;
} Facts;
Reason decide(const Copy *c, const Facts *f);

/* relay_begin enqueues the first bytes of a copy, such that what the stream does next waits for all of them,
   and returns how many. The caller has the driver copy the rest, at least one byte, by the program's own call,
   and then calls relay_end. 0, with the reason: nothing was enqueued, and nothing is to be ended. */
size_t relay_begin(Copy *c, Reason *why);
void relay_end(Copy *c);

/* relay_forget waits for copies of a device whose primary context the program is about to end, and gives up
   what is in it. */
void relay_forget(CUdevice device);

/* relay_share lets relays access memory that the program has mapped for a device. */
typedef struct {
  int type, device, flags; /* 1 is a device, 3 reads and writes */
} AccessRight;
void relay_share(CUdeviceptr at, size_t bytes, CUdevice device);

/* relay_child is called in a process forked from this one, and says whether there is state of the driver in it,
   which cannot be used there. */
int relay_child(void);

/* relay_report writes the rate of relayed copies and what became of the relays. */
void relay_report(FILE *out);

/* relay_complaint is set if the environment is wrong, and then says in which way. */
extern char relay_complaint[256];
#endif
