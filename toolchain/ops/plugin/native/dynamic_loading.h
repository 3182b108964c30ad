// dlopen and its like, so that the library also loads on hosts older than the one it was built on.
#pragma once

#include <dlfcn.h>

#if defined(__x86_64__) && defined(__GLIBC__)
// glibc 2.34 moved these into libc under a new version. The old version is still there, and older
// hosts have no other; whoever loads a plugin there already holds libdl.
__asm__(".symver dlopen,dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym,dlsym@GLIBC_2.2.5");
__asm__(".symver dlerror,dlerror@GLIBC_2.2.5");
__asm__(".symver dlclose,dlclose@GLIBC_2.2.5");
__asm__(".symver dladdr,dladdr@GLIBC_2.2.5");
#endif
