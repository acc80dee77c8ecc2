/** uPlot, which its own script defines. */
declare const uPlot: any;
