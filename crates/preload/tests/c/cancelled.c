/* A driver whose copy never ends (-DDRIVER), and a program that cancels the thread that made one. The thread's end unwinds
   what called the driver: the preload, if it lies between. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#ifdef DRIVER
int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t bytes) {
    (void)to, (void)from, (void)bytes;
    for (;;) pause();
}
#else
int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t bytes);

static void clean_up(void *nothing) {
    (void)nothing;
    puts("cleaned up");
}

static void *copying(void *bytes) {
    pthread_cleanup_push(clean_up, NULL);
    cuMemcpyHtoD_v2(4096, bytes, *(size_t *)bytes);
    pthread_cleanup_pop(0);
    return NULL;
}

int main(int count, char **arguments) {
    size_t bytes = count == 2 ? strtoull(arguments[1], NULL, 10) : 0;
    void *result;
    pthread_t thread;
    pthread_create(&thread, NULL, copying, &bytes);
    pthread_cancel(thread);
    pthread_join(thread, &result);
    puts(result == PTHREAD_CANCELED ? "cancelled" : "ended");
    return 0;
}
#endif
