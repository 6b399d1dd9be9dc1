/* What the files of the stand-in for /dev/gdrdrv share. */
#ifndef STANDIN_GDRDRV_H
#define STANDIN_GDRDRV_H

#include "standin.h"

/* Part of a pin's memory that is contiguous in the file. */
struct run {
	struct object *object;
	size_t offset, bytes; /* in the file */
};

struct pin {
	struct node *node;
	uint64_t handle;
	uint64_t va;	    /* rounded, as is the size */
	size_t bytes;
	bool aligned;	    /* of whole GPU pages only: others are never mapped */
	bool dead;	    /* its memory was freed */
	uint32_t wanted;    /* mapping type asked for, or 0 */
	uint32_t type;	    /* mapping type while it is mapped, or 0 */
	size_t windows;	    /* pieces of address space that show it */
	struct run *runs;
	size_t run_count;
	struct pin *next;
};

/* An open file of the node. It lives as long as its descriptor or any of its windows. */
struct node {
	pid_t opener;
	bool open;
	size_t windows;
	uint64_t next_handle;
	struct pin *pins;
	struct node *next;
};

/* module.c. All under the lock. */
extern struct node *module_nodes;
int module_minor(void);
bool module_persistent(void);
/* The errno that GDRCOPY_STANDIN_FAULT names for this call, or 0. */
int module_fault(const char *call);
__attribute__((format(printf, 1, 2))) void module_log(const char *format, ...);
/* An ioctl's errno, or 0. */
int module_ioctl(struct node *node, unsigned long request, void *argument);
struct pin *module_pin_at(struct node *node, uint64_t handle);
/* Drops the pins of a closed file that nothing shows any more, and the file. */
void module_settle(struct node *node);

/* windows.c. All under the lock. */
/* Maps a pin; an errno or 0. */
int windows_map(struct pin *pin, void **addr, size_t len, int prot, bool fixed);
/* The address space is about to hold something else, or nothing. */
void windows_gone(void *addr, size_t len);
/* Whatever shows the pin raises SIGBUS from now on. */
void windows_revoke(const struct pin *pin);
/* Whatever shows the pin is no longer counted. */
void windows_forget(const struct pin *pin);
bool windows_any(void);

#endif
