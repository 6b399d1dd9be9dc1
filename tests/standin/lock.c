/* One lock for everything: this is a model, not a driver. */
#include "standin.h"

#include <pthread.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void standin_enter(void)
{
	pthread_mutex_lock(&lock);
}

void standin_leave(void)
{
	pthread_mutex_unlock(&lock);
}

/* A child must not inherit the lock from a thread that it lacks. */
__attribute__((constructor)) static void survive_fork(void)
{
	pthread_atfork(standin_enter, standin_leave, standin_leave);
}
